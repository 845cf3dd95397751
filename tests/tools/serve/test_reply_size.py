"""How much of a server's reply is read, and what of it is text; and queries that no server would take."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sorl_env.tool import ToolCall, ToolInputError, ToolRequest, ToolUnavailableError
from sorl_env.toolbox import Toolbox
from sorl_tools.search.http import HttpSearch
from sorl_tools.search.http_cache import ReplyCache
from sorl_tools.search.http_protocol import MAX_QUERY_CHARS, max_reply_bytes, split_queries
from sorl_tools.serve.protocol import RequestLimits, parse_request

from .faulty_server import FaultyServer, answer, send

MB = 1 << 20
LIMIT = max_reply_bytes(1, 3)


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


def pour(head: bytes, size: int, sent: list[int]) -> Callable[[socket.socket], None]:
    """Send a head and then ``size`` bytes of a reply, as far as the other side takes them."""

    def behave(client: socket.socket) -> None:
        client.sendall(head)
        body = document("x" * size)
        for start in range(0, size, 65536):
            client.sendall(body[start : start + 65536])
            sent[0] += 65536

    return behave


@WAYS
@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_long_reply_is_not_read_to_its_end(faulty: FaultyServer, ask: Ask, says_its_length: bool) -> None:
    length = (
        b"Content-Length: %d\r\n" % len(document("x" * 50 * MB))
        if says_its_length
        else b"Connection: close\r\n"
    )
    sent = [0]
    faulty.behaviours = [pour(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", 50 * MB, sent)]
    search = HttpSearch(faulty.url)
    outcome = ask(search, "x")
    assert isinstance(outcome, ToolUnavailableError)
    assert f"more than {LIMIT} bytes" in str(outcome) and "index shorter passages" in str(outcome)
    assert sent[0] < LIMIT + 16 * MB  # what the sockets hold
    search.close()


@WAYS
def test_a_reply_within_the_limit_is_read_and_cut(faulty: FaultyServer, ask: Ask) -> None:
    faulty.behaviours = [send(answer(body=document("x" * (LIMIT - 1000))))]
    search = HttpSearch(faulty.url)
    outcome = ask(search, "x")
    assert isinstance(outcome, ToolCall)
    assert len(outcome.reply) == 8000 and outcome.cut_from == len("Doc 1: ") + LIMIT - 1000
    search.close()


@WAYS
def test_a_compressed_reply_is_refused_before_it_is_unpacked(faulty: FaultyServer, ask: Ask) -> None:
    packed = gzip.compress(document("x" * 50 * MB))
    assert len(packed) < LIMIT
    faulty.behaviours = [send(answer("200 OK", packed, "Content-Encoding: gzip"))]
    search = HttpSearch(faulty.url)
    assert "a reply in 'gzip', not identity" in str(ask(search, "x"))
    search.close()


def test_the_limit_grows_with_what_is_asked_for_up_to_an_end() -> None:
    assert LIMIT == MB
    assert max_reply_bytes(1, 3) < max_reply_bytes(2, 3) < max_reply_bytes(2, 10)
    assert max_reply_bytes(256, 100) == 64 * MB


def test_the_answer_about_health_has_a_limit_too(faulty: FaultyServer) -> None:
    sent = [0]
    faulty.behaviours = [pour(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", 50 * MB, sent)]
    search = HttpSearch(faulty.url)
    assert search.fingerprint == faulty.url and sent[0] < 16 * MB
    search.close()


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


# --- queries ---


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


def test_a_long_query_in_a_batch_fails_alone(faulty: FaultyServer) -> None:
    search = HttpSearch(faulty.url)
    requests = [ToolRequest("search", query) for query in ("x" * 10_000, "Mozart", "y" * 10_000)]
    outcomes = Toolbox([search], retries=0).call_batch(requests)
    assert [(outcome.ok, outcome.hits) for outcome in outcomes if isinstance(outcome, ToolCall)] == [
        (False, None), (True, 1), (False, None)
    ]  # fmt: skip
    search.close()


@pytest.mark.parametrize("letter", ["x", "\x00", "\u4e2d", "\U0001f600", '"'])
@pytest.mark.parametrize("length", [1, 500, MAX_QUERY_CHARS])
def test_every_request_is_one_that_our_server_takes(letter: str, length: int) -> None:
    queries = [letter * length] * 700
    parts = split_queries(queries)
    assert [query for part in parts for query in part] == queries
    for part in parts:
        body = json.dumps({"queries": part, "topk": 3, "return_scores": True}).encode()
        assert len(body) <= RequestLimits().max_body_bytes
        assert parse_request(body, RequestLimits()).queries == tuple(part)


def test_a_search_in_process_has_the_same_limit() -> None:
    from sorl_tools.corpus import Passage
    from sorl_tools.search.bm25_search import BM25Search

    search = BM25Search([Passage("0", "Oslo", "the capital of Norway")])
    requests = [ToolRequest("search", query) for query in ("x" * 10_000, "Norway")]
    outcomes = Toolbox([search]).call_batch(requests)
    assert [getattr(outcome, "ok", None) for outcome in outcomes] == [False, True]
    assert not getattr(Toolbox([search]).call(requests[0]), "ok", True)
