"""What tools and tasks raise that is no ``Exception``, and calls that never return."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from sorl_env import (
    Example,
    ParsedTurn,
    Task,
    Toolbox,
    ToolCall,
    ToolUnavailableError,
    ToolUseEnv,
    UserError,
    outside,
)
from sorl_env.outside import OutsideError, ask_for_items
from sorl_env.tool import as_tool

from ..waiting import wait_until
from .conftest import REQUEST, SEARCH, Call
from .test_episode_tools import roll_out

RAISED = [SystemExit(0), asyncio.CancelledError(), concurrent.futures.CancelledError(), GeneratorExit()]
RAISED += [StopIteration("x"), BaseException("odd")]


def box_of(kind: str, act: Callable[[], str]) -> Toolbox:
    """A toolbox whose only tool is called in the way that ``kind`` says."""

    def search(query: str) -> str:
        return act()

    if kind == "inline":
        search.inline = True  # type: ignore[attr-defined]
    if kind in ("thread", "inline"):
        return Toolbox([search], timeout_s=30)

    class Search:
        name, description, schema = "search", "", as_tool(search).schema

        def __call__(self, query: str) -> str:
            return act()

    async def acall(query: str) -> str:
        await asyncio.sleep(0)
        return act()

    tool: Any = Search()
    tool.acall = acall
    return Toolbox([tool], timeout_s=30)


@pytest.mark.parametrize("kind", ["thread", "inline", "awaited"])
@pytest.mark.parametrize(
    "raised", RAISED, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}"
)
def test_whatever_a_tool_raises_is_a_bug_of_the_tool(raised: BaseException, kind: str, call: Call) -> None:
    script = [raised]

    def act() -> str:
        if script:
            raise script.pop()
        return "fine"

    box = box_of(kind, act)

    first, second = call(box, REQUEST), call(box, REQUEST)
    assert isinstance(first, ToolUnavailableError) and "bug in the tool" in str(first)
    assert isinstance(second, ToolCall) and second.reply == "fine"


def test_ctrl_c_in_the_main_thread_is_the_users_and_elsewhere_the_tools() -> None:
    def act() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        box_of("inline", act).call(REQUEST)
    outcome = box_of("thread", act).call(REQUEST)
    assert "raised KeyboardInterrupt()" in str(outcome)


@pytest.mark.parametrize("field", ["reward", "turn_reward"])
@pytest.mark.parametrize("raised", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_reward_that_ends_python_ends_its_own_trajectory(
    make_task: Callable[..., Task], field: str, raised: BaseException
) -> None:
    def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
        if example.id == "2":
            raise raised
        return {"exact_match": 1.0}

    env, found = ToolUseEnv(make_task(**{field: reward})), list[Any]()
    scripts = {str(i): [f"<think>b</think><answer>gold {i}</answer>"] for i in range(4)}
    # a dead event loop would take the others with it; in a thread, because Ctrl-C in the main thread is the user's
    thread = threading.Thread(target=lambda: found.extend(roll_out(env, scripts)))
    thread.start()
    thread.join()
    assert [one.stop_reason for one in found] == ["answer", "answer", "error", "answer"]
    assert type(raised).__name__ in found[2].error


def test_a_prompt_that_ends_python_is_an_error_with_its_lines(make_task: Callable[..., Task]) -> None:
    def prompt(example: Example) -> str:
        raise SystemExit(0)

    with pytest.raises(OutsideError, match=r"it raised SystemExit\(0\)") as raised:
        ToolUseEnv(make_task(prompt=prompt)).reset()
    assert raised.traceback[-1].path.name == "test_outside.py"


def test_calls_that_never_return_are_counted_and_end_the_run(
    monkeypatch: pytest.MonkeyPatch, call: Call, make_task: Callable[..., Task]
) -> None:
    monkeypatch.setattr(outside, "MAX_GIVEN_UP", 3)
    release = threading.Event()

    def act() -> str:
        release.wait(60)
        return "late"

    box = box_of("thread", act)
    box.timeout_s = 0.01
    for _ in range(2):
        assert isinstance(call(box, REQUEST), ToolUnavailableError)
    release.set()
    wait_until(lambda: not box._bound["search"].threads._given_up)  # they have returned, and count no longer
    release.clear()
    for _ in range(2):
        assert isinstance(call(box, REQUEST), ToolUnavailableError)
    said = "tool search: 3 calls have not returned, although each was given up after 0.01 s"
    with pytest.raises(UserError, match=said):
        call(box, REQUEST)
    env = ToolUseEnv(make_task())
    env.toolbox = box
    with pytest.raises(UserError, match=r"tool search: \d+ calls have not returned"):  # it ends a run
        roll_out(env, {str(i): [SEARCH] for i in range(4)})
    release.set()


HERE = re.escape(__file__)
NOT_FINITE = (math.nan, math.inf, -math.inf, np.float32("nan"))


def give(value: Any) -> Any:
    return value


def test_items_are_a_copy_with_plain_numbers() -> None:
    items = {"a": 1.0, "b": -0.5, "c": True, "d": np.float32(0.5), "e": np.int64(2)}
    checked = ask_for_items("toy", give, items)
    assert checked == items and checked is not items
    assert all(isinstance(value, (int, float)) for value in checked.values())


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([("a", 1.0)], r"returned \[\('a', 1.0\)\] \(list\); return {name: number}, "),
        ({"a": None}, r"returned 'a' \(str\): None among its items; "),
        ({"a": "1"}, r"returned 'a' \(str\): '1' \(str\) among its items; "),
        ({1: 1.0}, r"returned 1 \(int\): 1.0 \(float\) among its items; "),
        *(
            ({"a": 1.0, "b": value}, r"gave item 'b' as (nan|inf|-inf); it must be finite")
            for value in NOT_FINITE
        ),
    ],
)
def test_what_is_no_reward(items: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"^task toy: its reward \({HERE}:\d+\) {said}"):
        ask_for_items("toy", functools.partial(give), items)
