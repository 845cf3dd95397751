"""Tool replies recorded and replayed: the same run without the tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_env import (
    Task,
    Toolbox,
    ToolCall,
    ToolInputError,
    ToolReply,
    ToolRequest,
    ToolSettings,
    ToolUnavailableError,
    ToolUseEnv,
    UserError,
    as_tool,
)
from sorl_env.replay import ReplayTool


class Counting:
    """Numbers its replies, so that a second call for the same query differs from the first."""

    name = "search"
    description = "Search."
    schema: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query: str) -> ToolReply:
        self.calls += 1
        if query == "bad":
            raise ToolInputError("no such query")
        if query == "out":
            raise ConnectionError("refused")
        return ToolReply(f"{query} \u2028 {self.calls}", hits=self.calls, metadata={"ids": ["7"]})


class Batched(Counting):
    def call_batch(self, queries: Sequence[str]) -> list[ToolReply | Exception]:
        results: list[ToolReply | Exception] = []
        for query in queries:
            try:
                results.append(self(query))
            except (ToolInputError, ConnectionError) as error:
                results.append(error)
        return results

    async def acall(self, query: str) -> ToolReply:
        return self(query)


def sync(box: Toolbox, queries: Sequence[str]) -> list[Any]:
    return [box.call(ToolRequest("search", query)) for query in queries]


def batched(box: Toolbox, queries: Sequence[str]) -> list[Any]:
    return list(box.call_batch([ToolRequest("search", query) for query in queries]))


def awaited(box: Toolbox, queries: Sequence[str]) -> list[Any]:
    async def run() -> list[Any]:
        return [await box.acall(ToolRequest("search", query)) for query in queries]

    return asyncio.run(run())


Ask = Callable[[Toolbox, Sequence[str]], list[Any]]


@pytest.mark.parametrize("ask", [sync, batched, awaited])
@pytest.mark.parametrize("kind", [Counting, Batched])
def test_a_replay_is_the_run_without_its_faults(ask: Ask, kind: type[Counting], tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    tool = kind()
    recorded = ask(Toolbox([ReplayTool(tool, record=file)], retries=0), ["a", "b", "bad", "out"])
    assert [type(outcome) for outcome in recorded] == [ToolCall, ToolCall, ToolCall, ToolUnavailableError]

    silent = kind()
    replayed = ask(Toolbox([ReplayTool(silent, replay=file)]), ["bad", "b", "a", "b", "out"])
    assert silent.calls == 0
    assert [getattr(outcome, "reply", None) for outcome in replayed] == [
        "no such query",
        recorded[1].reply,
        recorded[0].reply,
        recorded[1].reply,
        None,
    ]
    assert [outcome.ok for outcome in replayed[:4]] == [False, True, True, True]
    assert [outcome.hits for outcome in replayed[1:3]] == [recorded[1].hits, recorded[0].hits] != [None, None]
    assert [outcome.cached for outcome in replayed[:4]] == [False, True, True, True]
    assert "has no reply of search to 'out'; record it first" in str(replayed[4])


def test_equal_requests_get_the_first_reply(tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    box = Toolbox([ReplayTool(Counting(), record=file)])
    assert [call.reply for call in sync(box, ["a", "a"])] == ["a \u2028 1", "a \u2028 2"]
    assert len(file.read_text(encoding="utf-8").splitlines()) >= 1
    replay = Toolbox([ReplayTool(Counting(), replay=file)])
    assert [call.reply for call in sync(replay, ["a", "a"])] == ["a \u2028 1", "a \u2028 1"]


def test_record_and_replay_of_one_file_is_a_cache(tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    for asked, calls in ((["a", "b"], 2), (["b", "a", "c"], 1), (["a", "b", "c"], 0)):
        tool = Counting()
        assert len(sync(Toolbox([ReplayTool(tool, record=file, replay=file)]), asked)) == len(asked)
        assert tool.calls == calls


def test_a_recorder_that_was_stopped_in_a_line_is_gone_on_with(tmp_path: Path) -> None:
    """Wherever it was cut, a second recorder's rows stand on lines of their own, and all whole ones replay."""
    file = tmp_path / "replies.jsonl"
    sync(Toolbox([ReplayTool(Counting(), record=file)]), ["a", "b"])
    content = file.read_bytes()
    for length in range(len(content) + 1):
        file.write_bytes(content[:length])
        sync(Toolbox([ReplayTool(Counting(), record=file, replay=file)]), ["c"])
        replay = Toolbox([ReplayTool(Counting(), replay=file)])
        whole = ["a", "b"][: content[: length + 1].count(b"\n")]
        assert all(isinstance(call, ToolCall) and call.cached for call in sync(replay, [*whole, "c"]))


def test_arguments_of_several_parameters_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"

    def add(a: int, b: int) -> str:
        return str(a + b)

    record = Toolbox([ReplayTool(as_tool(add), record=file)])
    replay_of = lambda body: record.call(ToolRequest("add", body))  # noqa: E731
    assert replay_of('{"a": 1, "b": 2}').reply == "3"
    assert replay_of('{"a": 2, "b": 2}').reply == "4"
    replay = Toolbox([ReplayTool(as_tool(add), replay=file)])
    outcome = replay.call(ToolRequest("add", '{"b": 2, "a": 1}'))
    assert isinstance(outcome, ToolCall) and (outcome.reply, outcome.cached) == ("3", True)


def test_files_that_cannot_be_replayed_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl: no recorded tool replies there"):
        ReplayTool(Counting(), replay=tmp_path / "missing.jsonl")
    file = tmp_path / "broken.jsonl"
    good = json.dumps({"tool": "search", "argument": "a", "text": "x"})
    for line in (
        "{",
        '{"tool": "search"}',
        "[]",
        '{"tool": "search", "argument": "a", "text": "x", "more": 1}',
    ):
        file.write_text(f"{good}\n\n{line}\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"broken\.jsonl:3: not a recorded tool reply"):
            ReplayTool(Counting(), replay=file)


def test_an_environment_replays_an_episode_without_its_tool(
    make_task: Callable[..., Task], tmp_path: Path
) -> None:
    file = str(tmp_path / "replies.jsonl")
    turns = ["<think>a</think><search>x</search>", "<think>b</think><search>y</search>"]
    first, second = Counting(), Counting()

    def play(tool: Counting, settings: ToolSettings) -> list[str]:
        env = ToolUseEnv(make_task(tools=lambda settings: [tool]), tool_settings=settings)
        env.reset(seed=0)
        return [env.step(turn).observation for turn in turns]

    assert play(first, ToolSettings(record=file)) == play(second, ToolSettings(replay=file))
    assert (first.calls, second.calls) == (2, 0)


def test_closing_reaches_the_tool() -> None:
    class Closing(Counting):
        def close(self) -> None:
            self.calls = -1

    tool = Closing()
    Toolbox(
        [
            ReplayTool(tool, record="unused.jsonl"),
        ]
    ).close()
    assert tool.calls == -1
    Toolbox([ReplayTool(Batched(), record="unused.jsonl")]).close()
