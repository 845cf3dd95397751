"""Calls that fail, hang, or ask for what there is not, in this thread and on an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading

import httpx
import pytest

from sorl_env import Toolbox, ToolCall, ToolInputError, ToolReply, ToolRequest, ToolUnavailableError

from .conftest import REQUEST, Call, Scripted


class Inline(Scripted):
    inline = True


class Awaited(Scripted):
    async def acall(self, query: str) -> ToolReply:
        await asyncio.sleep(0)
        return self(query)


@pytest.fixture(params=[Scripted, Inline, Awaited])
def kind(request: pytest.FixtureRequest) -> type[Scripted]:
    return request.param


def http_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://retriever")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


def test_a_reply(call: Call, kind: type[Scripted]) -> None:
    outcome = call(Toolbox([kind(ToolReply("Doc 1", hits=2))]), REQUEST)
    assert isinstance(outcome, ToolCall)
    assert 0 <= outcome.latency_s < 5
    assert outcome == ToolCall("search", "who", "Doc 1", latency_s=outcome.latency_s, hits=2)


@pytest.mark.parametrize(
    "outage",
    [TimeoutError(), ConnectionResetError("gone"), OSError("unreachable"), ToolUnavailableError("busy"),
     http_error(503), http_error(429), httpx.ReadTimeout("slow"), httpx.ConnectError("refused")],
    ids=repr,
)  # fmt: skip
def test_outages_are_retried(call: Call, kind: type[Scripted], outage: Exception) -> None:
    tool = kind(outage, outage, "Doc 1")
    outcome = call(Toolbox([tool], retries=2, backoff_s=0.001), REQUEST)
    assert isinstance(outcome, ToolCall)
    assert (outcome.reply, outcome.attempts, outcome.ok) == ("Doc 1", 3, True)


def test_an_outage_that_stays_is_an_error_with_a_record(call: Call, kind: type[Scripted]) -> None:
    tool = kind(ConnectionError("refused"))
    outcome = call(Toolbox([tool], retries=2, backoff_s=0.001), REQUEST)
    assert isinstance(outcome, ToolUnavailableError)
    assert str(outcome) == "tool search is unavailable after 3 tries: ConnectionError: refused"
    assert isinstance(outcome.__cause__, ConnectionError)
    assert outcome.call is not None
    assert (outcome.call.ok, outcome.call.attempts, outcome.call.error) == (False, 3, str(outcome))
    assert len(tool.asked) == 3


def test_retries_end_at_the_deadline(call: Call, kind: type[Scripted]) -> None:
    """All 40 retries, each twice as far away as the last, would take centuries."""
    tool = kind(ConnectionError("refused"))
    outcome = call(Toolbox([tool], timeout_s=1.0, retries=40, backoff_s=0.05), REQUEST)
    assert isinstance(outcome, ToolUnavailableError) and len(tool.asked) < 10


def test_a_refused_request_is_an_observation(call: Call, kind: type[Scripted]) -> None:
    outcome = call(Toolbox([kind(ToolInputError("the query is empty"))]), REQUEST)
    assert isinstance(outcome, ToolCall)
    assert (outcome.ok, outcome.reply, outcome.error) == (False, "the query is empty", "the query is empty")
    assert outcome.attempts == 1


@pytest.mark.parametrize("bug", [KeyError("result"), http_error(404), ValueError("x")], ids=repr)
def test_a_bug_is_contained_not_retried_and_logged_once(
    call: Call, kind: type[Scripted], bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tool = kind(bug.with_traceback(None))  # without that of the test before
    box = Toolbox([tool])
    with caplog.at_level(logging.ERROR, logger="sorl_env"):
        outcomes = [call(box, REQUEST) for _ in range(3)]
    assert all(isinstance(outcome, ToolUnavailableError) for outcome in outcomes)
    assert f"bug in the tool: {type(bug).__name__}" in str(outcomes[0])
    assert len(tool.asked) == 3
    (shown,) = [logging.Formatter().format(record) for record in caplog.records]
    assert "in __call__" in shown and "sorl_env" not in shown.split("Traceback")[1]


class Hanging(Scripted):
    """Hangs until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, query: str) -> ToolReply:
        self.release.wait(60)
        return ToolReply(query)


@pytest.mark.parametrize(("address", "named"), [("http://host:8000", " from http://host:8000"), (None, "")])
def test_a_call_that_hangs_is_abandoned_and_names_the_server_behind_the_tool(
    address: str | None, named: str, call: Call
) -> None:
    tool = Hanging()
    tool.url = address
    outcome = call(Toolbox([tool], timeout_s=0.1), REQUEST)
    tool.release.set()
    assert isinstance(outcome, ToolUnavailableError)
    assert f"no reply{named} within 0.1 s" in str(outcome)


def test_a_coroutine_that_ignores_its_cancellation_is_abandoned_too() -> None:
    class Stubborn(Scripted):
        abandoned = False

        async def acall(self, query: str) -> ToolReply:
            while not self.abandoned:
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    self.asked.append("cancelled")
            return ToolReply("late")

    async def call_and_abandon(tool: Stubborn) -> object:
        outcome = await Toolbox([tool], timeout_s=0.1).acall(REQUEST)
        tool.abandoned = True  # before that, only the deadline can have ended the call
        return outcome

    tool = Stubborn()
    assert isinstance(asyncio.run(call_and_abandon(tool)), ToolUnavailableError)
    assert tool.asked == ["cancelled"]


def test_a_dead_call_stalls_no_other() -> None:
    def quick(query: str) -> str:
        return query

    async def both(tool: Hanging) -> list[object]:
        box = Toolbox([tool, quick], timeout_s=50)
        dead = [asyncio.ensure_future(box.acall(REQUEST)) for _ in range(8)]
        alive = [await box.acall(ToolRequest("quick", str(i))) for i in range(20)]
        assert not any(call.done() for call in dead)
        tool.release.set()
        assert [getattr(outcome, "reply", None) for outcome in await asyncio.gather(*dead)] == ["who"] * 8
        return alive

    alive = asyncio.run(both(Hanging()))
    assert [getattr(outcome, "reply", None) for outcome in alive] == [str(i) for i in range(20)]
