"""``sorl-serve --mcp``: the client of the ``mcp`` package against a live server, and what no client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import ServerProcess

mcp = pytest.importorskip("mcp", reason="needs pip install -e '.[mcp]'")

HEADERS = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


@pytest.fixture(scope="module")
def server(corpus: Path, cache: Path) -> Iterator[ServerProcess]:
    options = ["--mcp", "--max-query-chars", "200", "--max-top-k", "5", "--stall_timeout_s", "3"]
    with ServerProcess(corpus, *options, cache=cache) as running:
        yield running


def address(server: ServerProcess) -> str:
    return server.url.replace("/retrieve", "/mcp")


def calls(
    server: ServerProcess, *arguments: dict[str, Any], mode: str = "auto", tool: str = "search"
) -> list[Any]:
    """The texts of calls of one client, and whether each is an error."""

    async def ask() -> list[Any]:
        async with mcp.Client(address(server), mode=mode) as client:
            said = [await client.call_tool(tool, one) for one in arguments]
            return [("".join(block.text for block in one.content), one.is_error) for one in said]

    return asyncio.run(asyncio.wait_for(ask(), 60))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_search(server: ServerProcess, mode: str) -> None:
    text = "Doc 1 (Mozart): The composer Mozart was born in Salzburg."
    found = calls(
        server, {"query": "composers born in Salzburg", "topk": 1}, {"query": "nothing-of-this"}, mode=mode
    )
    assert found == [(text, False), ("No passages found.", False)]


def test_the_listing(server: ServerProcess) -> None:
    async def ask() -> Any:
        async with mcp.Client(address(server)) as client:
            return (await client.list_tools()).tools

    (tool,) = asyncio.run(ask())
    assert tool.name == "search"
    assert tool.input_schema["properties"]["query"]["maxLength"] == 200
    assert tool.input_schema["properties"]["topk"]["maximum"] == 5
    assert tool.input_schema["required"] == ["query"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": "x" * 201}, "query exceeds 200 characters"),
        ({"query": "x", "topk": 6}, "topk=6: give 1 to 5"),
        ({"query": "x", "topk": True}, "topk must be a whole number"),
        ({"query": "x", "topk": "3"}, "topk must be a whole number"),
        ({}, "query must be a text"),
        ({"query": ["x"]}, "query must be a text"),
        ({"query": "x", "other": 1}, "no parameter 'other'"),
    ],
)
def test_what_a_model_gets_wrong_it_reads(
    server: ServerProcess, arguments: dict[str, Any], message: str
) -> None:
    ((text, is_error),) = calls(server, arguments)
    assert is_error and message in text


def post(server: ServerProcess, body: bytes, **headers: str) -> Any:
    return server.request("POST", "/mcp", body, {**HEADERS, **headers})


def test_hostile_requests(server: ServerProcess) -> None:
    ((text, is_error),) = calls(server, {"query": "x"}, tool="find")
    assert is_error and "no tool 'find' here" in text
    listing = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    assert post(server, listing).status == 200
    assert post(server, listing, Origin="http://evil.example").status == 403
    assert server.request("GET", "/mcp", None, {"Accept": "text/event-stream"}).status == 405
    assert server.request("DELETE", "/mcp").status == 405
    assert post(server, b"x" * 5_000_000).status == 413
    for body in (b"", b"{", b"[]", b"null", b"\x80", b"\xff", b"[" * 100_000, listing[:-1]):
        assert 400 <= post(server, body).status < 500, body[:20]
    for body in (b'{"jsonrpc": "2.0", "id": 1, "method": "nothing"}', b'{"jsonrpc": "2.0", "method": "x"}'):
        assert post(server, body).status < 500
    half = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", "arguments": {"query": "'
    assert 200 <= post(server, half + b'\\ud800"}}}').status < 500
    listen = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": {}}
    assert post(server, json.dumps(listen).encode(), **{"MCP-Protocol-Version": "2026-07-28"}).status < 500
    assert calls(server, {"query": "Bizet", "topk": 1})[0][0].startswith("Doc 1 (Bizet)")
    counted = server.request("GET", "/metrics").body.decode()
    assert 'sorl_serve_requests_total{status="403"} 1.0' in counted


def test_too_much_to_do_is_no_answer(start: Any) -> None:
    busy = start("--mcp", "--max-waiting", "1", "--max-batch", "1", "--timeout-s", "0.000001")
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "search", "arguments": {"query": "a"}},
    }
    reply = post(busy, json.dumps(call).encode())
    assert reply.status == 503 and reply.headers["retry-after"] == "1"


def test_without_the_option_there_is_no_route(start: Any) -> None:
    reply = post(start(), b"{}")
    assert reply.status == 404 and "--mcp" in reply.json["error"]
