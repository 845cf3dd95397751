"""MCP servers over HTTP on loopback: a real one of the ``mcp`` package, and one that answers wrongly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sorl_env.tool import ToolCall, ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.mcp import mcp_tools
from sorl_tools.mcp.server import TOKEN_VARIABLE

from ...waiting import wait_until
from . import servers

pytest.importorskip("mcp", reason="needs pip install 'sorl[mcp]'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the search extra: pip install 'sorl[search]'")


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


Answer = tuple[int, str, bytes]


@contextmanager
def liar(answer: Callable[[dict[str, Any]], Answer], headers: list[Any] | None = None) -> Iterator[str]:
    """A server that begins as a good one does; ``answer`` makes the status, media type and body for a call."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if headers is not None:
                headers.append(dict(self.headers))
            method = message["method"]
            if method == "tools/call":
                self.reply(*answer(message))
            elif method == "initialize":
                info = {"name": "liar", "version": "0"}
                version = message["params"]["protocolVersion"]
                self.result(message, protocolVersion=version, capabilities={}, serverInfo=info)
            elif method == "tools/list":
                self.result(message, tools=[{"name": "shelf", "inputSchema": servers.SCHEMA}])
            elif "id" in message:
                error = {"code": -32601, "message": "unknown"}
                self.reply(200, "application/json", encoded(id=message["id"], error=error))
            else:
                self.reply(202, "application/json", b"")

        def result(self, message: dict[str, Any], **result: Any) -> None:
            self.reply(200, "application/json", encoded(id=message["id"], result=result))

        def reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply(405, "text/plain", b"")

        do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()
    server.server_close()


def encoded(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode()


def said(text: str, identity: Any) -> Answer:
    return 200, "application/json", encoded(id=identity, result={"content": [{"type": "text", "text": text}]})


@pytest.mark.parametrize(
    "answer",
    [
        lambda message: (503, "application/json", b'{"error": "busy"}'),
        lambda message: (401, "application/json", b"{}"),
        lambda message: (302, "text/plain", b""),
        lambda message: (202, "application/json", b""),
        lambda message: (200, "text/html", b"<html>"),
        lambda message: (200, "application/json", b"{"),
        lambda message: (200, "application/json", b"[" * 100_000),
        lambda message: (200, "application/json", b"\xff"),
        lambda message: (200, "text/event-stream", b"data: nothing\n\n"),
        lambda message: said("x" * 50_000_000, message["id"]),
    ],
    ids=["busy", "token", "elsewhere", "accepted", "html", "cut", "deep", "no UTF-8", "stream", "50 MB"],
)
def test_what_is_an_outage(answer: Callable[[dict[str, Any]], Answer]) -> None:
    with liar(answer) as url:
        toolbox = Toolbox(mcp_tools(url, 20.0), timeout_s=20.0, retries=1, backoff_s=0.01)
        outcome = toolbox.call(ToolRequest("shelf", "x"))
        assert isinstance(outcome, ToolUnavailableError), outcome
        assert len(str(outcome)) < 2000
        toolbox.close()


def test_an_answer_to_another_request_is_not_taken() -> None:
    with liar(lambda message: said("for somebody else", 987654)) as url:
        tools = mcp_tools(url, 60.0)
        tools[0].server.timeout_s = 2.0
        outcome = Toolbox(tools, timeout_s=2.0, retries=0).call(ToolRequest("shelf", "x"))
        assert isinstance(outcome, ToolUnavailableError)
        tools[0].close()


def test_the_token_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "word")
    headers: list[Any] = []
    with liar(lambda message: said("here", message["id"]), headers) as url:
        toolbox = Toolbox(mcp_tools(url, 60.0), timeout_s=60.0)
        outcome = toolbox.call(ToolRequest("shelf", "x"))
        assert isinstance(outcome, ToolCall) and outcome.reply == "here"
        toolbox.close()
    assert {one["Authorization"] for one in headers if "Authorization" in one} == {"Bearer word"}
    assert all("gzip" not in one.get("Accept-Encoding", "") for one in headers)


def test_a_password_in_the_address_is_not_shown() -> None:
    with liar(lambda message: said("here", message["id"])) as url:
        tools = mcp_tools(url.replace("http://", "http://me:secret@"), 60.0)
        assert "secret" not in f"{tools[0].fingerprint} {tools[0].url}"
        tools[0].close()
