"""The retrieval client against a real server on the loopback interface, which misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.tool import ToolRequest, ToolUnavailableError
from sorl_env.toolbox import Toolbox
from sorl_tools.search.http import FINGERPRINT_HEADER, HttpSearch, ReplyCache

from ..loopback import LoopbackServer


def passages(request: dict[str, Any]) -> tuple[int, bytes]:
    """What Search-R1's server sends."""
    result = [
        [
            {"document": {"id": str(rank), "contents": f'"{query}"\npassage {rank}'}, "score": 1.0 - rank}
            for rank in range(request["topk"])
        ]
        for query in request["queries"]
    ]
    return 200, json.dumps({"result": result}).encode()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    running = LoopbackServer(passages)
    yield running
    running.close()


@pytest.fixture
def search(server: LoopbackServer) -> Iterator[HttpSearch]:
    tool = HttpSearch(server.address, top_k=2, timeout_s=30.0)
    yield tool
    tool.close()


def test_protocol(server: LoopbackServer, search: HttpSearch) -> None:
    reply = search("who?")
    sent = {"queries": ["who?"], "topk": 2, "return_scores": True}
    assert server.requests == [{**sent, "path": "/retrieve", "token": None}]
    assert reply.text == "Doc 1 (who?): passage 0\nDoc 2 (who?): passage 1"
    assert reply.hits == 2
    server.respond = lambda request: (200, b'{"result": [[]]}')
    assert search("x").text == "No passages found."


def test_connections_are_pooled(server: LoopbackServer, search: HttpSearch) -> None:
    for query in "abcde":
        search(query)
    assert len(server.connections) == 1


def test_many_at_a_time_on_an_event_loop(server: LoopbackServer, search: HttpSearch) -> None:
    all_here = threading.Barrier(20, timeout=60)

    def slowly(request: dict[str, Any]) -> tuple[int, bytes]:
        all_here.wait()  # passes only when 20 requests are under way
        return passages(request)

    server.respond = slowly
    box = Toolbox([search])

    async def ask(count: int) -> list[Any]:
        return await asyncio.gather(*(box.acall(ToolRequest("search", str(i))) for i in range(count)))

    for _ in range(2):  # one client serves one event loop after another
        outcomes = asyncio.run(ask(20))
        assert [outcome.reply.split("\n")[0] for outcome in outcomes] == [
            f"Doc 1 ({i}): passage 0" for i in range(20)
        ]


def test_replies_are_kept_under_the_index_that_gave_them(server: LoopbackServer) -> None:
    """The server changes its index between two searches, and back."""
    index = "old"
    server.respond = lambda request: (
        200,
        json.dumps({"result": [[{"document": {"id": "1", "contents": f"{index} text"}}]]}).encode(),
    )
    server.headers = lambda: {FINGERPRINT_HEADER: index}
    cache = ReplyCache()
    search = HttpSearch(server.address, top_k=1, cache=cache)
    assert search("a").text == "Doc 1: old text"
    index = "new"
    assert search("a").cached  # nobody has told of another index
    assert search("b").text == "Doc 1: new text"
    assert search("a").text == "Doc 1: new text"
    for fingerprint, query, kept in (("old", "a", "old"), ("new", "a", "new"), ("new", "b", "new")):
        assert (cache.get((fingerprint, 1, query)) or [])[0].text == f"{kept} text"
    assert cache.get(("old", 1, "b")) is None
    search.close()


@pytest.mark.parametrize(
    "body",
    [
        *b'<html> | | \xff\xfe | [] | {} | {"result": null} | {"result": [["text"]]} | {"result": [5]}'.split(
            b" | "
        ),
        *b'{"result": [[{"score": 1.0}]]} | {"result": [[{"document": {"id": "0"}}]]}'.split(b" | "),
        *b'{"result": []} | {"result": [[], []]}'.split(b" | "),
    ],
)
def test_garbage_is_an_outage_that_quotes_it(server: LoopbackServer, search: HttpSearch, body: bytes) -> None:
    server.respond = lambda request: (200, body)
    with pytest.raises(ToolUnavailableError, match="breaks the protocol"):
        search("x")


@pytest.mark.parametrize("status", [301, 400, 404, 422])
def test_a_wrong_address_or_request_is_not_tried_again(
    server: LoopbackServer, search: HttpSearch, status: int
) -> None:
    server.respond = lambda request: (status, b'{"detail": "no"}')
    with pytest.raises(ValueError, match=f"answered {status}: .* is search_url its /retrieve"):
        search("x")
    server.requests.clear()
    outcome = Toolbox([search]).call(ToolRequest("search", "x"))
    assert isinstance(outcome, ToolUnavailableError)
    assert f"answered {status}" in str(outcome)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://host/retrieve", "http://", "http://host:port/", "retrieve"),
        *("", "http://a,", "http://a/retrieve,http://a", ["http://a", "ftp://b"], []),
    ],
)
def test_addresses_that_cannot_be(url: str | list[str]) -> None:
    with pytest.raises(UserError, match="search_url="):
        HttpSearch(url)
