"""Tools that a text names, and their description in the prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from sorl_env import Example, Task, ToolSettings, ToolUseEnv, as_tool
from sorl_env.errors import UserError


class Shelf:
    """A tool that says whether it was closed."""

    description = "What lies\n on a shelf."
    schema: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"name": {"type": "string"}}}

    def __init__(self, name: str = "shelf") -> None:
        self.name = name
        self.closed = 0

    def __call__(self, name: str) -> str:
        return f"{name}: bolts"

    def close(self) -> None:
        self.closed += 1


def add(left: int, right: int = 0) -> str:
    """Add two numbers."""
    return str(left + right)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Shelf]:
    """The tools that were opened for texts, named by what follows the colon."""
    made: list[Shelf] = []

    def open_tools(text: str, settings: ToolSettings) -> list[Any]:
        made.append(Shelf(text.partition(":")[2]))
        if text.startswith("mcp+episode:"):
            made[-1].schema = as_tool(add).schema  # type: ignore[misc]
        return [made[-1]]

    module = ModuleType("sorl_tools.mcp")
    module.open_tools = open_tools  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


TASK = Task(
    name="shelves",
    prompt=lambda example: f"Q: {example.question}",
    reward=lambda example, turns: {},
    parse_row=lambda row: Example("0", "?"),
    embedded=lambda split: [Example("0", "How many?", ("1",))],
)


def test_a_task_that_names_its_tools(opened: list[Shelf]) -> None:
    own = Shelf("own")
    env = ToolUseEnv(dataclasses.replace(TASK, tools=[own, "mcp:first"]))
    prompt, info = env.reset(seed=0)
    assert (prompt, info["tools"]) == ("Q: How many?", ("own", "first"))
    result = env.step("<think>x</think><first>oak</first>")
    assert "oak: bolts" in result.observation
    spawned = env.spawn()
    spawned.close()
    assert opened[0].closed == 0
    env.close()
    assert (own.closed, opened[0].closed) == (0, 1)


def test_tools_of_the_settings_are_described_in_the_prompt(opened: list[Shelf]) -> None:
    settings = ToolSettings(tools=("mcp:first", "mcp+episode:second"))
    env = ToolUseEnv(dataclasses.replace(TASK, tools=[add]), tool_settings=settings)
    prompt, info = env.reset(seed=0)
    assert info["tools"] == ("add", "first", "second")
    assert prompt == (
        "Q: How many?\n\nYou can also use these tools:\n"
        "<first> name </first>: What lies on a shelf.\n"
        f"<second> a JSON object with the schema {json.dumps(as_tool(add).schema)} </second>: What lies on a shelf."
    )
    env.close()
    assert [one.closed for one in opened] == [1, 1]


UNKNOWN = [(text, "names no tools") for text in ("mpc:x", "mcp", "", ":x", "http://x")]


@pytest.mark.parametrize(("tool", "said"), [*UNKNOWN, (Shelf("first"), "two tools share a name")])
def test_what_was_opened_is_closed_after_a_refusal(opened: list[Shelf], tool: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ToolUseEnv(dataclasses.replace(TASK, tools=["mcp:first", tool]))
    assert opened[0].closed == 1


def test_the_listed_tools_of_one_group_begin_an_episode_together() -> None:
    class Group:
        begun = 0

        def new_episode(self, example: Any, seed: int) -> dict[str, Any]:
            self.begun += 1
            return {name: Remembering(name, self) for name in ("first", "second")}

    class Remembering(Shelf):
        def __init__(self, name: str, group: Group) -> None:
            super().__init__(name)
            self.group = group

        def new_episode(self, example: Any, seed: int) -> Any:
            return self.group.new_episode(example, seed)[self.name]

    group = Group()
    env = ToolUseEnv(TASK, tools=[Remembering("first", group), add, Remembering("second", group)])
    env.reset(seed=0)
    assert group.begun == 1 and env.toolbox.names == ("first", "add", "second")
    env.reset(seed=0)
    assert group.begun == 2


def test_the_package_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mcp"):
        ToolUseEnv(dataclasses.replace(TASK, tools=["mcp:no-such-program-at-all"]))
