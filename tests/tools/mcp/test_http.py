"""MCP servers over HTTP on loopback: a real one of the ``mcp`` package, and one that answers wrongly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sorl_env.tool import ToolCall, ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.mcp import mcp_tools
from sorl_tools.mcp.server import TOKEN_VARIABLE

from ...waiting import wait_until
from ..loopback import LoopbackServer, Reply
from . import servers

pytest.importorskip("mcp", reason="needs pip install -e '.[mcp]'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the search extra: pip install -e '.[search]'")


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """A server of an ASGI application in a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    server.should_exit = True
    thread.join(30)


@pytest.mark.parametrize("stateless", [True, False])
def test_a_real_server(stateless: bool) -> None:
    with serving(servers.stock_server().streamable_http_app(stateless_http=stateless)) as url:
        toolbox = Toolbox(mcp_tools(url, 60.0), timeout_s=60.0)
        assert toolbox.names == ("shelf", "note_add")
        outcome = toolbox.call(ToolRequest("shelf", "oak A 1"))
        assert isinstance(outcome, ToolCall) and outcome.reply == "bolts 7 , lamps 3"
        outcome = toolbox.call(ToolRequest("shelf", "nowhere"))
        assert isinstance(outcome, ToolCall) and not outcome.ok and "there is no shelf" in outcome.reply
        toolbox.close()
        outcome = toolbox.call(ToolRequest("shelf", "oak A 1"))  # with a new connection
        assert isinstance(outcome, ToolCall) and outcome.reply == "bolts 7 , lamps 3"
        toolbox.close()


@contextmanager
def liar(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, LoopbackServer]]:
    """A server that begins as a good one does; ``answer`` makes the reply to a call."""

    def respond(message: dict[str, Any]) -> Reply:
        method = message["method"]
        if method == "tools/call":
            return answer(message)
        if "id" not in message:
            return 202, b""
        if method == "initialize":
            version, info = message["params"]["protocolVersion"], {"name": "liar", "version": "0"}
            return result(message["id"], protocolVersion=version, capabilities={}, serverInfo=info)
        if method == "tools/list":
            return result(message["id"], tools=[{"name": "shelf", "inputSchema": servers.SCHEMA}])
        return encoded(id=message["id"], error={"code": -32601, "message": "unknown"})

    server = LoopbackServer(respond)
    server.health = (405, b"")
    yield f"{server.address}/mcp", server
    server.close()


def encoded(**fields: Any) -> Reply:
    return 200, json.dumps({"jsonrpc": "2.0", **fields}).encode()


def result(identity: Any, **fields: Any) -> Reply:
    return encoded(id=identity, result=fields)


def said(text: str, identity: Any) -> Reply:
    return result(identity, content=[{"type": "text", "text": text}])


@pytest.mark.parametrize(
    "answer",
    [
        lambda message: (503, b'{"error": "busy"}'),
        lambda message: (401, b"{}"),
        lambda message: (302, b"", "text/plain"),
        lambda message: (202, b""),
        lambda message: (200, b"<html>", "text/html"),
        lambda message: (200, b"{"),
        lambda message: (200, b"[" * 100_000),
        lambda message: (200, b"\xff"),
        lambda message: (200, b"data: nothing\n\n", "text/event-stream"),
        lambda message: said("x" * 50_000_000, message["id"]),
    ],
    ids=["busy", "token", "elsewhere", "accepted", "html", "cut", "deep", "no UTF-8", "stream", "50 MB"],
)
def test_what_is_an_outage(answer: Callable[[dict[str, Any]], Reply]) -> None:
    with liar(answer) as (url, _):
        toolbox = Toolbox(mcp_tools(url, 20.0), timeout_s=20.0, retries=1, backoff_s=0.01)
        outcome = toolbox.call(ToolRequest("shelf", "x"))
        assert isinstance(outcome, ToolUnavailableError), outcome
        assert len(str(outcome)) < 2000
        toolbox.close()


def test_an_answer_to_another_request_is_not_taken() -> None:
    with liar(lambda message: said("for somebody else", 987654)) as (url, _):
        tools = mcp_tools(url, 60.0)
        tools[0].server.timeout_s = 2.0
        outcome = Toolbox(tools, timeout_s=2.0, retries=0).call(ToolRequest("shelf", "x"))
        assert isinstance(outcome, ToolUnavailableError)
        tools[0].close()


def test_the_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "word")
    with liar(lambda message: said("here", message["id"])) as (url, server):
        toolbox = Toolbox(mcp_tools(url, 60.0), timeout_s=60.0)
        outcome = toolbox.call(ToolRequest("shelf", "x"))
        assert isinstance(outcome, ToolCall) and outcome.reply == "here"
        toolbox.close()
    assert {request["token"] for request in server.requests} == {"Bearer word"}
    assert server.encodings == {"identity"}


def test_a_password_in_the_address_is_not_shown() -> None:
    with liar(lambda message: said("here", message["id"])) as (url, _):
        tools = mcp_tools(url.replace("http://", "http://me:secret@"), 60.0)
        assert "secret" not in f"{tools[0].fingerprint} {tools[0].url}"
        tools[0].close()
