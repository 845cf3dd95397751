"""A task of six questions with a canned search tool, for tests of the environment itself."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from sorl_env import Example, Limits, ParsedTurn, Task, Toolbox, ToolReply, ToolRequest, ToolUseEnv
from sorl_env.rewards import exact_match

EXAMPLES = tuple(Example(str(i), f"Question {i}?", (f"gold {i}",), metadata={"number": i}) for i in range(6))

SEARCH = "<think>a</think><search>who</search>"
ANSWER = "<think>b</think><answer>gold {}</answer>"
INVALID = "no tags"


class CannedSearch:
    """Answers every query with one passage and keeps what it was asked."""

    name = "search"
    description = "Search nothing."
    schema: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}
    inline = True

    def __init__(self, passage: str = "Doc 1 (Canned): about {query}") -> None:
        self.passage = passage
        self.queries: list[str] = []

    def __call__(self, query: str) -> ToolReply:
        self.queries.append(query)
        return ToolReply(self.passage.replace("{query}", query), hits=1)


class Scripted:
    """A search tool that goes through a script and then repeats its last entry. It raises the exceptions in it."""

    name = "search"
    description = ""
    schema: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}
    inline = False
    url: str | None = None

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.asked: list[str] = []

    def __call__(self, query: str) -> Any:
        self.asked.append(query)
        step = self.script[min(len(self.asked), len(self.script)) - 1]
        if isinstance(step, Exception):
            raise step
        return step


REQUEST = ToolRequest("search", "who")
Call = Callable[[Toolbox, ToolRequest], Any]


@pytest.fixture(params=["in this thread", "on a loop"])
def call(request: pytest.FixtureRequest) -> Call:
    """A call of a tool, in each of the two ways."""
    if request.param == "on a loop":
        return lambda box, asked: asyncio.run(box.acall(asked))
    return lambda box, asked: box.call(asked)


def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
    answers = [turn.content for turn in turns if turn.kind == "answer"]
    return {"exact_match": exact_match(answers[-1], example.golden_answers) if answers else 0.0}


@pytest.fixture
def canned() -> CannedSearch:
    return CannedSearch()


@pytest.fixture
def make_task(canned: CannedSearch) -> Callable[..., Task]:
    """``make_task(**changes)``: the task with other fields."""
    task = Task(
        name="toy",
        prompt=lambda example: f"Answer with the tags <answer>Beijing</answer>. {example.question}",
        reward=reward,
        parse_row=lambda row: Example(row["id"], row["question"], tuple(row["golden_answers"])),
        tools=[canned],
        embedded=lambda split: EXAMPLES,
        limits=Limits(max_turns=3),
    )
    return lambda **changes: dataclasses.replace(task, **changes)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task()


@pytest.fixture
def env(task: Task) -> ToolUseEnv:
    return ToolUseEnv(task)
