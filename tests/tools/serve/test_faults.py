"""The client against servers that are killed, restarted, slow, or speak nonsense, and queries that none would take."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.tool import ToolCall, ToolInputError, ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.corpus import Passage
from sorl_tools.search.bm25_search import BM25Search
from sorl_tools.search.http import MAX_QUERY_CHARS, HttpSearch, ReplyCache

from ...waiting import wait_until
from .faulty_server import FAULTS, HANGING, FaultyServer, answer, hang, send


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    server = FaultyServer()
    yield server
    server.close()


@pytest.mark.parametrize("way", ["threads", "loop"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_more_attempt(faulty: FaultyServer, name: str, way: str) -> None:
    faulty.behaviours = [FAULTS[name]]
    search = HttpSearch(faulty.url, timeout_s=1.0 if name in HANGING else 30.0)
    box = Toolbox([search], timeout_s=60.0, backoff_s=0.01)
    request = ToolRequest("search", "Mozart")
    outcome = box.call(request) if way == "threads" else asyncio.run(box.acall(request))
    assert isinstance(outcome, ToolCall), outcome
    assert (outcome.ok, outcome.attempts, outcome.hits) == (True, 2, 1)
    search.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_is_an_outage_of_its_own_call(faulty: FaultyServer, name: str) -> None:
    faulty.behaviours = [FAULTS[name]] * 2
    search = HttpSearch(faulty.url, timeout_s=0.3)
    outcome = Toolbox([search], retries=1, backoff_s=0.01).call(ToolRequest("search", "x"))
    assert isinstance(outcome, ToolUnavailableError)
    assert outcome.call is not None and outcome.call.attempts == 2 and not outcome.call.ok
    assert outcome.call.latency_s < 5  # a reply that drips is not waited for
    assert isinstance(Toolbox([search]).call(ToolRequest("search", "x")), ToolCall)
    search.close()


def test_the_next_server_is_asked(faulty: FaultyServer) -> None:
    gone = FaultyServer()
    gone.close()
    other = FaultyServer()
    search = HttpSearch(f"{gone.url}, {faulty.url},{other.url}", timeout_s=3.0)
    assert search.urls == (gone.url, faulty.url, other.url)
    for _ in range(18):
        assert search("x").hits == 1  # no call fails, so the toolbox has nothing to retry
    # they take turns, also that of the one that is gone
    assert (len(faulty.requests), len(other.requests)) == (12, 6)
    faulty.behaviours = [hang]
    other.behaviours = [hang]
    assert isinstance(Toolbox([search]).call(ToolRequest("search", "x")), ToolCall)
    search.close()
    other.close()


def test_cached_replies_cost_no_request(start: Any, tmp_path: Path) -> None:
    running = start()
    fingerprint = running.request("GET", "/health").json["fingerprint"]
    search = HttpSearch(running.url, cache=ReplyCache(path=tmp_path / "replies.db"))
    box = Toolbox([search])
    first = box.call(ToolRequest("search", "Mozart"))
    again = box.call(ToolRequest("search", "Mozart"))
    assert isinstance(first, ToolCall) and isinstance(again, ToolCall)
    assert (first.cached, again.cached) == (False, True)
    assert (first.reply, first.hits) == (again.reply, again.hits)
    on_loop = asyncio.run(box.acall(ToolRequest("search", "Mozart")))
    assert isinstance(on_loop, ToolCall) and on_loop.cached
    search.close()
    running.stop()
    offline = HttpSearch(running.url, cache=ReplyCache(path=tmp_path / "replies.db"))
    with pytest.raises(ToolUnavailableError):
        offline("Mozart")  # it cannot know what index would answer
    offline._fingerprint = fingerprint
    assert offline("Mozart").cached
    offline.close()


def test_the_fingerprint_of_a_server_that_is_being_started(start: Any, corpus: Path) -> None:
    first = start()
    expected = first.request("GET", "/health").json["fingerprint"]
    first.stop()
    search = HttpSearch(first.url, timeout_s=30.0)
    threading.Timer(0.5, lambda: start(port=first.port, ready=False)).start()
    assert search.fingerprint == expected
    search.close()


def test_the_fingerprint_where_nobody_answers_or_tells(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    other_make = HttpSearch(faulty.url)  # a server of another make: its /health is not ours
    assert other_make.fingerprint == faulty.url
    other_make.close()
    gone = FaultyServer()
    gone.close()
    search = HttpSearch(gone.url, timeout_s=1.5)
    with pytest.raises(UserError, match="no server answers; start one: sorl-serve"):
        _ = search.fingerprint
    (said,) = [record.getMessage() for record in caplog.records]  # it asks more often than it says so
    assert "waiting up to 1.5 s" in said
    search.close()


def test_an_index_that_changes_in_mid_run_is_said(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "9", "contents": "Mozart was here."}\n')
    running = start()
    search = HttpSearch(running.url)
    before = search("Mozart"), search.fingerprint
    running.stop()
    start(source=other, port=running.port)
    outcome = Toolbox([search]).call(ToolRequest("search", "Mozart"))
    assert isinstance(outcome, ToolCall) and outcome.reply != before[0].text
    assert search.fingerprint != before[1]
    assert "searches another index now" in caplog.text
    search.close()


@pytest.mark.slow
def test_a_killed_server_that_comes_back_loses_no_call(start: Any) -> None:
    """Eight rollouts search on while the server is killed and started anew on the same port."""
    running = start()
    search = HttpSearch(running.url, top_k=1, timeout_s=30.0)
    box = Toolbox([search], timeout_s=30.0, retries=8)
    stop = threading.Event()
    outcomes: list[Any] = []

    def rollout(number: int) -> None:
        while not stop.is_set():
            outcomes.append(box.call(ToolRequest("search", f"Mozart {number}")))

    threads = [threading.Thread(target=rollout, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    running.process.kill()
    running.process.wait()
    time.sleep(3.0)
    before = len(outcomes)
    start(port=running.port)
    wait_until(lambda: len(outcomes) >= before + 100)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) >= before + 100
    assert all(isinstance(outcome, ToolCall) and outcome.hits == 1 for outcome in outcomes)
    assert any(outcome.attempts > 1 and outcome.latency_s > 2.0 for outcome in outcomes)
    search.close()


def test_calls_at_a_time_wait_together_for_a_server_that_is_gone(start: Any) -> None:
    running = start()
    search = HttpSearch(running.url, timeout_s=1.5)
    box = Toolbox([search], timeout_s=1.5, backoff_s=0.05)
    running.stop()
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(lambda n: box.call(ToolRequest("search", str(n))), range(16)))
    for outcome in outcomes:
        assert isinstance(outcome, ToolUnavailableError) and outcome.call is not None and outcome.call.error
        assert outcome.call.latency_s < 20  # one after another the last would take 24 s
    search.close()


def test_event_loops_that_end_leave_no_connections(start: Any) -> None:
    running = start()
    search = HttpSearch(running.url)

    async def ask() -> None:
        await asyncio.gather(*(search.acall("Mozart") for _ in range(8)))

    for _ in range(3):
        asyncio.run(ask())
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        asyncio.run(ask())
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8
    search.close()


# --- what of a reply is text, and queries that are too long ----------------------------------------------
def threads(search: HttpSearch, query: str) -> Any:
    return Toolbox([search], retries=0).call(ToolRequest("search", query))


def loop(search: HttpSearch, query: str) -> Any:
    return asyncio.run(Toolbox([search], retries=0).acall(ToolRequest("search", query)))


WAYS = pytest.mark.parametrize("ask", [threads, loop])
Ask = Callable[[HttpSearch, str], Any]


def document(text: str) -> bytes:
    return json.dumps({"result": [[{"document": {"id": "1", "contents": text}}]]}).encode()


@pytest.mark.parametrize(
    "body", [b'{"fingerprint": {"a": 1}}', b'{"fingerprint": 7}', b"[" * 10_000, b'"x"', b"\xff"]
)
def test_nonsense_about_health(faulty: FaultyServer, body: bytes) -> None:
    faulty.behaviours = [send(answer(body=body))]
    search = HttpSearch(faulty.url)
    assert search.fingerprint == faulty.url
    search.close()


@WAYS
@pytest.mark.parametrize("kept", [True, False])
def test_half_surrogate_pairs_in_a_reply(faulty: FaultyServer, ask: Ask, kept: bool, tmp_path: Path) -> None:
    # What it says of its health, and that it closes the connection: else the next request may go out on a closed one.
    health = send(answer("200 OK", b"{}", "Connection: close"))
    faulty.behaviours = [health] if kept else []
    faulty.behaviours.append(send(answer(body=document('"\ud800"\nb \ude00\ud83d c \ud83d\ude00'))))
    search = HttpSearch(faulty.url, cache=ReplyCache(path=tmp_path / "cache") if kept else None)
    for _ in range(1 + kept):
        outcome = ask(search, "who \ud800?")
        assert outcome.reply == "Doc 1 (\ufffd): b \ufffd\ufffd c \U0001f600"
    search.close()


@WAYS
def test_a_long_query_is_the_policys_fault(faulty: FaultyServer, ask: Ask) -> None:
    search = HttpSearch(faulty.url)
    outcome = ask(search, "x" * (MAX_QUERY_CHARS + 1))
    assert isinstance(outcome, ToolCall) and not outcome.ok and not faulty.requests
    assert (
        outcome.reply
        == f"The query has {MAX_QUERY_CHARS + 1} characters, at most {MAX_QUERY_CHARS} are allowed."
    )
    with pytest.raises(ToolInputError):
        search("x" * (MAX_QUERY_CHARS + 1))
    assert isinstance(ask(search, "x" * MAX_QUERY_CHARS), ToolCall) and len(faulty.requests) == 1
    search.close()


def test_a_search_in_process_has_the_same_limit() -> None:
    search = BM25Search([Passage("0", "Oslo", "the capital of Norway")])
    outcomes = [Toolbox([search]).call(ToolRequest("search", query)) for query in ("x" * 10_000, "Norway")]
    assert [getattr(outcome, "ok", None) for outcome in outcomes] == [False, True]
