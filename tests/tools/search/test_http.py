"""The retrieval client against a real server on the loopback interface, which misbehaves on demand; and its cache."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.tool import ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.corpus import Passage
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


def test_a_token_in_the_address_is_sent_and_never_told(server: LoopbackServer) -> None:
    search = HttpSearch(server.address.replace("//", "//any:s3cret@"))
    search("who?")
    assert server.requests[0]["token"] == f"Basic {base64.b64encode(b'any:s3cret').decode()}"
    assert search.fingerprint == f"{server.address}/retrieve"
    for reply in ((500, b""), (404, b""), (0, b""), (200, b"{}")):
        server.respond = lambda request, reply=reply: reply  # type: ignore[misc]
        with pytest.raises((ToolUnavailableError, ValueError), match=server.address) as told:
            search("who?")
        assert "s3cret" not in str(told.value)
    search.close()


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


# --- the cache of replies -----------------------------------------------------------------------------
A = [Passage("0", "Bizet", "né à Paris"), Passage("1", "", 'no "title"')]


def key(query: str, fingerprint: str = "sha256:1", top_k: int = 3) -> tuple[str, int, str]:
    return fingerprint, top_k, query


def test_a_key_is_index_and_top_k_and_query() -> None:
    cache = ReplyCache()
    cache.put(key("a"), A)
    assert cache.get(key("a")) == A
    assert cache.get(key("a", fingerprint="sha256:2")) is None
    assert cache.get(key("a", top_k=4)) is None
    assert cache.get(key("A")) is None


def test_a_file_outlives_its_process_and_gives_up_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "replies.db"
    first = ReplyCache(path, max_replies=10)
    for number in range(9):
        first.put(key(str(number)), A)
    first.put(key("none"), [])
    second = ReplyCache(path)
    assert second.get(key("0")) == A and second.get(key("none")) == []
    second.put(key("1"), A[:1])
    second.close()
    first.put(key("new"), A)
    assert [number for number in range(9) if first.get(key(str(number))) is None] == [0]
    assert first.get(key("1")) == A[:1]
    first._file.execute("UPDATE replies SET passages = substr(passages, 1, 9)")
    assert first.get(key("1")) is None  # damaged, so the server is asked again
    first.close()


def test_threads_and_writers_share_a_file(tmp_path: Path) -> None:
    caches = [ReplyCache(tmp_path / "replies.db") for _ in range(2)]

    def work(number: int) -> bool:
        cache = caches[number % 2]
        cache.put(key(str(number % 50)), [Passage(str(number % 50), "", "x")])
        return cache.get(key(str(number % 50))) == [Passage(str(number % 50), "", "x")]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(200)))
    for cache in caches:
        cache.close()


def test_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database, but long enough to look at " * 100)
    for path in (tmp_path / "notes.txt", tmp_path, tmp_path / "notes.txt" / "replies.db"):
        with pytest.raises(UserError, match="replies cannot be kept there"):
            ReplyCache(path)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE replies (name TEXT)")
    other.close()
    with pytest.raises(UserError, match=r"other.db: replies cannot be kept there .*no such column"):
        ReplyCache(tmp_path / "other.db")


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "replies.db")
    cache._file.execute("PRAGMA max_page_count = 10")
    with pytest.raises(OSError, match=r"replies\.db: database or disk is full"):
        cache.put(key("a"), [Passage("0", "", "x" * 200_000)])
    assert cache.get(key("a")) is None
    cache.close()


def test_a_cache_closed_while_others_read_is_an_error_and_no_crash() -> None:
    """An episode that ends at its deadline leaves its search to its thread."""
    for _ in range(200):
        cache, ended = ReplyCache(), []

        def read(cache: ReplyCache = cache, ended: list[str] = ended) -> None:
            with pytest.raises(OSError, match="closed") as caught:
                while True:
                    cache.get(key("a"))
            ended.append(str(caught.value))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        cache.close()
        for reader in readers:
            reader.join()
        assert len(ended) == 2
