"""What an environment is made of, what it closes, and those spawned from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from sorl_env import Limits, Task, ToolSettings, ToolUseEnv

from .conftest import ANSWER, INVALID, SEARCH


def test_the_settings_reach_the_tools(make_task: Callable[..., Task], canned: Any) -> None:
    seen: list[ToolSettings] = []

    def build(settings: ToolSettings) -> list[Any]:
        seen.append(settings)
        return [canned]

    task = make_task(tools=build)
    ToolUseEnv(task, tool_settings=ToolSettings(corpus="c.jsonl", top_k=5))
    ToolUseEnv(task, tools=[])
    assert seen == [ToolSettings(corpus="c.jsonl", top_k=5)]


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
