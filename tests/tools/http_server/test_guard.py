"""The attacks that every server meets, against a real one on loopback: the application here is a small one."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs the search extra: pip install -e '.[search]'")
pytest.importorskip("starlette", reason="needs the search extra: pip install -e '.[search]'")
pytest.importorskip("uvicorn", reason="needs the search extra: pip install -e '.[search]'")
pytest.importorskip("websockets", reason="needs the train extra: pip install -e '.[train]'")

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from sorl_tools.http_server.app import Guard, make_app
from sorl_tools.http_server.options import ServerSettings
from sorl_tools.http_server.server import Server

from ...waiting import wait_until

LIMITS: dict[str, Any] = {"max_body_bytes": 1 << 20, "stall_timeout_s": 1.0, "drain_s": 10}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /read HTTP/1.1\r\nHost: localhost\r\n"


async def read(request: Request) -> Response:
    return PlainTextResponse(f"read {len(await request.body())}")


async def late(request: Request) -> Response:
    await asyncio.sleep(float(request.query_params["s"]))
    return PlainTextResponse("late")


async def long(request: Request) -> Response:
    return Response(b"x" * (64 << 20))


async def bug(request: Request) -> Response:
    raise ZeroDivisionError


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    while (message := await websocket.receive())["type"] == "websocket.receive":
        await websocket.send_text(message["text"])


def application(settings: ServerSettings) -> Any:
    gets = {"/health": read, "/late": late, "/long": long, "/bug": bug}
    routes = [Route(path, endpoint) for path, endpoint in gets.items()]
    app = make_app([Route("/read", read, methods=["POST"]), *routes])
    app.router.routes.append(WebSocketRoute("/ws", echo))
    return Guard(app, settings, websocket_idle_s=1.0)


class Serving:
    """A server on a thread."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ServerSettings(**{**LIMITS, **settings})
        self.server = Server(application(self.settings), self.settings, max_message_bytes=1024)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.socket])))
        self.thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        said = reply.status, reply.read().decode()
        connection.close()
        return said

    def close(self) -> None:
        self.server.stop()
        self.thread.join(30)
        self.socket.close()


@contextmanager
def serving(**settings: Any) -> Iterator[Serving]:
    running = Serving(**settings)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


def read_to_end(client: socket.socket) -> bytes:
    """All that the server still says; fails unless it then ends the connection."""
    said = b""
    try:
        while got := client.recv(1 << 20):
            said += got
    except ConnectionError:
        pass
    return said


# --- web pages ------------------------------------------------------------------------------------------------
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://[::1"},
    {"Origin": "http://127.0.0.1:1"},  # another server of this machine
    {"Host": "evil.example"},  # a name that was made to resolve to 127.0.0.1
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "localhost@evil.example"},
    {"Host": "[::1"},
    {"Host": ""},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_web_page_is_refused(server: Serving, headers: dict[str, str]) -> None:
    assert server.ask("/health", **headers)[0] == 403
    status, said = server.ask("/read", "POST", b"{}", **headers, **{"Content-Type": "text/plain"})
    assert status == 403 and "--token_file" in said


@pytest.mark.parametrize("headers", [FOREIGN[0], FOREIGN[3]], ids=str)
def test_a_web_page_opens_no_websocket(server: Serving, headers: dict[str, str]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        handshake = {
            "Host": f"127.0.0.1:{server.port}", "Upgrade": "websocket", "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        } | headers  # fmt: skip
        lines = ["GET /ws HTTP/1.1", *(f"{name}: {value}" for name, value in handshake.items()), "", ""]
        client.sendall("\r\n".join(lines).encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.8.8.8:1", "[::1]:80"])
def test_programs_of_this_machine_may_ask(server: Serving, host: str) -> None:
    assert server.ask("/health", Host=host)[0] == 200
    assert server.ask("/health", Host=host, Origin=f"http://{host}")[0] == 200


def test_a_token_is_wanted_everywhere_and_then_any_host_may_ask() -> None:
    with serving(token="secret") as guarded:
        right = {"Authorization": "Bearer secret"}
        assert guarded.ask("/health")[0] == 200
        for path in ("/late?s=0", "/nothing", "/bug"):
            assert guarded.ask(path)[0] == 401
        wrong_ones = "Bearer other, bearer , secret, Basic, Basic !!, Basic d29yZA==, Digest secret"
        for wrong in wrong_ones.split(", "):
            assert guarded.ask("/late?s=0", Authorization=wrong)[0] == 401
        assert guarded.ask("/nothing", **right)[0] == 404
        assert guarded.ask("/late?s=0", **right, Host="other.example", Origin="http://evil.example")[0] == 200
        address = f"ws://127.0.0.1:{guarded.port}"
        for path in ("/ws", "/health"):
            with pytest.raises(InvalidStatus, match="403"):
                connect(address + path)
        with connect(f"{address}/ws", additional_headers=right) as client:
            client.send("word")
            assert client.recv() == "word"


# --- requests that two programs read in two ways --------------------------------------------------------------
@pytest.mark.parametrize(
    "request_",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: +5\r\n\r\nhello",
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        GET.replace(b"\r\n", b"\n"),
        GET[:-2] + b"X: a\r\n b\r\n\r\n",
        GET[:-2] + b"Host: other\r\n\r\n",
    ],
)
def test_smuggling(server: Serving, request_: bytes) -> None:
    with server.connect() as client:
        client.sendall(request_ + GET)  # which must not be answered
        said = read_to_end(client)
    assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1


# --- sizes ----------------------------------------------------------------------------------------------------
def test_a_body_has_a_limit(server: Serving) -> None:
    assert server.ask("/read", "POST", b"x" * (1 << 20)) == (200, f"read {1 << 20}")
    assert server.ask("/read", "POST", b"x" * ((1 << 20) + 1))[0] == 413
    with server.connect() as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(40):
            client.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "head",
    [
        GET[:-2] + b"X: ",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5;",  # a chunk's extension
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",  # a trailer
        b"GET /",
    ],
)
@pytest.mark.parametrize("piece", [997, 1 << 16])
def test_a_head_without_end_is_cut_off(server: Serving, head: bytes, piece: int) -> None:
    with server.connect() as client:
        client.sendall(head)
        sent = 0
        try:
            while sent < 50 << 20:
                sent += client.send(b"a" * piece)
        except ConnectionError:
            pass
    assert sent < 20 << 20  # what the sockets hold


def test_a_whole_head_has_the_limit_too(server: Serving) -> None:
    assert server.ask("/health", X="a" * 15_000)[0] == 200
    assert server.ask("/health", X="a" * 17_000)[0] == 431


# --- clients that stall ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /hea", b""),
        (GET + b"GET /hea", b"HTTP/1.1 200"),
        (GET, b"HTTP/1.1 200"),
        (POST + b"Content-Length: 10\r\n\r\n{", b"HTTP/1.1 408"),
        (b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n{", b"HTTP/1.1 4"),
    ],
)
def test_half_a_request_holds_no_connection(server: Serving, sent: bytes, answer: bytes) -> None:
    with server.connect() as client:
        client.sendall(sent)
        assert read_to_end(client).startswith(answer)
    wait_until(lambda: not server.server.server_state.connections)


def test_bytes_that_trickle_do_not_extend_the_time(server: Serving) -> None:
    with server.connect() as client:
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - started < 20:
                client.sendall(b"a")
                time.sleep(0.1)


def test_who_does_not_read_the_reply_is_cut_off(server: Serving) -> None:
    with server.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(GET.replace(b"health", b"long"))
        wait_until(lambda: server.server.server_state.connections)
        wait_until(lambda: not server.server.server_state.connections)


def test_who_is_slow_but_reads_is_not(server: Serving) -> None:
    with server.connect() as client:
        client.sendall(b"GET /late?s=2.5 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_to_end(client).endswith(b"late")  # the server was at work
        took = 0
    with server.connect() as client:
        client.sendall(GET.replace(b"health", b"long").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        for _ in range(8):
            time.sleep(0.3)
            took += len(client.recv(1 << 20))
        assert took + len(read_to_end(client)) > 64 << 20


def test_a_silent_websocket_is_closed(server: Serving) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/ws") as client:
        client.send("word")
        assert client.recv() == "word"
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=20)
    with connect(f"ws://127.0.0.1:{server.port}/ws") as client:
        client.send("x" * 2000)
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=20)


# --- connections ----------------------------------------------------------------------------------------------
def test_there_is_a_most_of_connections() -> None:
    with serving(max_connections=20, stall_timeout_s=60.0) as small:
        held = [small.connect() for _ in range(20)]
        wait_until(lambda: len(small.server.server_state.connections) == 20)
        for _ in range(5):
            with small.connect() as further:
                assert read_to_end(further).startswith(b"HTTP/1.1 503")
        held[0].sendall(GET)  # who came in time is served
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200")
        for client in held:
            client.close()
        wait_until(lambda: not small.server.server_state.connections)
        assert small.ask("/health")[0] == 200


def test_the_most_lies_below_the_limit_of_open_files(caplog: pytest.LogCaptureFixture) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    child = os.fork()
    if child == 0:  # a hard limit can never be raised again
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        from sorl_tools.http_server.server import _within_file_limit

        most, backlog = _within_file_limit(4096)
        os._exit(0 if most > 200 and most + backlog + 100 < 1024 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]


# --- the end --------------------------------------------------------------------------------------------------
def test_requests_that_get_no_time_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    running = Serving(drain_s=0)
    clients = [running.connect() for _ in range(3)]
    for client in clients:
        client.sendall(b"GET /late?s=30 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: len(running.server.server_state.tasks) == 3)
    running.server.stop()
    for client in clients:
        said = read_to_end(client)
        assert said.startswith(b"HTTP/1.1 503") and b"the server is stopping" in said
    running.close()
    assert not [record for record in caplog.records if "Traceback" in record.getMessage() or record.exc_info]


def test_a_bug_is_logged_and_told(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert server.ask("/bug") == (500, '{"error":"a bug in the server; its log has the traceback"}')
        wait_until(lambda: "ZeroDivisionError" in caplog.text)
    assert server.ask("/health")[0] == 200
