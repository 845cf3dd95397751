"""What of a server's reply is text; and queries that no server would take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sorl_env.tool import ToolCall, ToolInputError, ToolRequest
from sorl_env.toolbox import Toolbox
from sorl_tools.search.http import MAX_QUERY_CHARS, HttpSearch, ReplyCache

from .faulty_server import FaultyServer, answer, send


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    server = FaultyServer()
    yield server
    server.close()


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
    from sorl_tools.corpus import Passage
    from sorl_tools.search.bm25_search import BM25Search

    search = BM25Search([Passage("0", "Oslo", "the capital of Norway")])
    outcomes = [Toolbox([search]).call(ToolRequest("search", query)) for query in ("x" * 10_000, "Norway")]
    assert [getattr(outcome, "ok", None) for outcome in outcomes] == [False, True]
