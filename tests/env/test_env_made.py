"""What an environment is made of, what it closes, those spawned from it, and how it shows a dialogue."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from sorl_env import Example, Limits, Task, ToolSettings, ToolUseEnv, UserError

from .conftest import ANSWER, INVALID, SEARCH


def test_shortcuts_reach_the_tools_settings(make_task: Callable[..., Task], canned: Any) -> None:
    seen: list[ToolSettings] = []

    def build(settings: ToolSettings) -> list[Any]:
        seen.append(settings)
        return [canned]

    task = make_task(tools=build)
    ToolUseEnv(task, corpus="c.jsonl", tool_settings=ToolSettings(top_k=5))
    ToolUseEnv(task, search_url="http://retriever")
    ToolUseEnv(task, tools=[])
    assert seen == [ToolSettings(corpus="c.jsonl", top_k=5), ToolSettings(search_url="http://retriever")]


def test_closing_closes_what_was_built_for_the_environment(
    make_task: Callable[..., Task], canned: Any
) -> None:
    closed: list[str] = []
    canned.close = lambda: closed.append("closed")
    built = make_task(tools=lambda settings: [canned])
    for env in (ToolUseEnv(make_task()), ToolUseEnv(built, tools=[canned]), ToolUseEnv(built).spawn()):
        env.close()
    assert closed == []
    ToolUseEnv(built).close()
    assert closed == ["closed"]


def test_limits_are_checked() -> None:
    for field, value in (
        ("max_turns", 0),
        ("max_new_tokens", -1),
        ("max_trajectory_tokens", 1),
        ("max_seconds", 0.0),
    ):
        with pytest.raises(ValueError, match=f"limits.{field} must be .*, not {re.escape(str(value))}"):
            Limits(**{field: value})  # type: ignore[arg-type]


def test_a_task_by_reference_with_knobs() -> None:
    env = ToolUseEnv("minihop", split="test")
    assert env.task.name == "minihop" and env.examples.split == "test"
    with pytest.raises(UserError, match="has no knob 'hopss'"):
        ToolUseEnv("minihop", knobs={"hopss": 3})


def test_spawned_environments_share_what_is_constant_and_nothing_else(env: ToolUseEnv) -> None:
    env.reset(options={"index": 0})
    env.step(SEARCH)
    other = env.spawn()
    assert (other.toolbox, other.examples, other.task) == (env.toolbox, env.examples, env.task)
    with pytest.raises(ResetNeeded):
        other.step(SEARCH)
    other.reset(options={"index": 1})
    other.step(INVALID)
    other.action_space.seed(1)
    assert env.example.id == "0"
    assert env.step(ANSWER.format(0)).reward == 1.0
    assert other.step(ANSWER.format(1)).info["turn"] == 1


def test_the_dialogue_is_shown_as_in_the_papers_table(make_task: Callable[..., Task]) -> None:
    example = Example("m", "Which one is not a treatment?", ("A",), {"A": "Radiation", "B": "Surgery"})
    env = ToolUseEnv(make_task(embedded=lambda split: [example]), render_mode="ansi")
    env.reset()
    env.step("<think>Hmm.</think>\n<search>role of radiation</search>")
    env.step("<think>Ah-ha!</think>\n<answer>A</answer>")
    shown = env.render()
    assert shown is not None
    assert re.sub(r"\x1b\[\d+m", "", shown).splitlines() == [
        "-" * 80,
        "Question: Which one is not a treatment?",
        "",
        "Options:",
        "A: Radiation",
        "B: Surgery",
        "-" * 80,
        "<think>Hmm.</think>",
        "<search>role of radiation</search>",
        "",
        "<information>",
        "Doc 1 (Canned): about role of radiation",
        "</information>",
        "-" * 80,
        "<think>Ah-ha!</think>",
        "<answer>A</answer>",
        "-" * 80,
    ]
    colours = dict(re.findall(r"\x1b\[(\d+)m</?(\w+)>\x1b\[0m", shown))
    assert colours == {"34": "think", "36": "search", "90": "information", "31": "answer"}


def test_no_text_talks_to_the_terminal(task: Task) -> None:
    env = ToolUseEnv(task, render_mode="ansi")
    env.reset()
    env.step("<think>\033[2J</think><search>x</search>")
    shown = env.render()
    assert shown is not None and "\033[2J" not in shown and "\N{SYMBOL FOR ESCAPE}[2J" in shown


def test_render_modes(task: Task) -> None:
    env = ToolUseEnv(task)
    env.reset()
    assert env.render() is None
    with pytest.raises(UserError, match="there is no render mode 'human'; use 'ansi' or None"):
        ToolUseEnv(task, render_mode="human")
