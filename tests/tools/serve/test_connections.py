"""What a client may hold before it has sent a whole request: sizes, times, and that honest clients notice nothing."""

from __future__ import annotations

import asyncio
import http.client
import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the search extra: pip install 'sorl[search]'")

import uvicorn

from sorl_tools.serve.connections import REFUSALS, ConnectionLimits, limited_config

SHORT = ConnectionLimits(
    max_head_bytes=4096, head_timeout_s=1.0, body_timeout_s=0.1, reply_timeout_s=0.6, idle_timeout_s=1
)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 24\r\n\r\n"
BODY = b'{"queries": ["Mozart"]} '
CHUNKED = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG_REPLY = b"x" * (64 << 20)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers /early before it reads, /long with much, and everything else once it has read the body."""
    path = scope["path"]
    read = 0
    while path not in ("/early", "/long"):
        message = await receive()
        read += len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    body = LONG_REPLY if path == "/long" else f"read {read}".encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Serving:
    """uvicorn on a thread, with one of its protocol classes."""

    def __init__(self, protocol: str) -> None:
        module = pytest.importorskip(f"uvicorn.protocols.http.{protocol}_impl")
        base = module.H11Protocol if protocol == "h11" else module.HttpToolsProtocol
        self.refused: Counter[str] = Counter()
        self.server = uvicorn.Server(limited_config(application, SHORT, self._count, drain_s=1.0, http=base))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.socket])))
        self.thread.start()

    def _count(self, reason: str) -> None:
        self.refused[reason] += 1

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()


@pytest.fixture(scope="module", params=["httptools", pytest.param("h11", marks=pytest.mark.slow)])
def serving(request: pytest.FixtureRequest) -> Iterator[Serving]:
    running = Serving(request.param)
    yield running
    running.close()


def read_until_closed(client: socket.socket, timeout_s: float) -> bytes:
    """All that the server still says; fails unless it then closes the connection in time."""
    deadline = time.monotonic() + timeout_s
    said = b""
    while True:
        client.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            got = client.recv(1 << 20)
        except ConnectionError:
            return said
        if not got:
            return said
        said += got


def read_replies(client: socket.socket, count: int) -> bytes:
    """What the server says until so many of the application's replies are whole."""
    said = b""
    while said.count(b"read ") < count:
        got = client.recv(65536)
        assert got, said
        said += got
    return said


def send_until_refused(client: socket.socket, head: bytes, size: int) -> int:
    """Send ``head`` and then as many bytes more; returns how many were taken before an answer or the end."""
    client.sendall(head)
    piece, sent = b"a" * 65536, 0
    while sent < size:
        readable, writable, _ = select.select([client], [client], [], 5.0)
        if readable or not writable:
            break
        try:
            sent += client.send(piece)
        except ConnectionError:
            break
    return sent


@pytest.mark.parametrize("piece", [100_000, 997], ids=["at once", "in pieces"])
def test_a_head_up_to_the_limit_is_read_and_one_byte_more_is_not(serving: Serving, piece: int) -> None:
    start = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: "
    for over in (0, 1):
        filler = b"a" * (SHORT.max_head_bytes - len(start) - 4 + over)
        with serving.connect() as client:
            sent = start + filler + b"\r\n\r\n"
            for at in range(0, len(sent), piece):
                client.sendall(sent[at : at + piece])
                time.sleep(0.002)
            first = client.recv(65536)
            if over:
                said = first + read_until_closed(client, 5.0)
                assert said.startswith(b"HTTP/1.1 431 ") and b"exceed 4096 bytes" in said
            else:
                assert first.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ",
        b"GET /",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 600,
        GET + b"GET / HTTP/1.1\r\nX-Long: ",
        CHUNKED + b"5\r\nhello\r\n0\r\nX-Trailer: ",
        CHUNKED + b"5;extension=",
    ],
    ids=["header", "target", "headers", "second request", "trailer", "chunk extension"],
)
def test_endless_text_around_a_body_is_not_kept(serving: Serving, head: bytes) -> None:
    before = sum(serving.refused.values())
    with serving.connect() as client:
        sent = send_until_refused(client, head, 200 << 20)
        read_until_closed(client, 5.0)
    assert sent < 20 << 20  # what the kernel's buffers hold
    assert sum(serving.refused.values()) <= before + 1  # h11 answers some of these itself, with 400


def test_half_sent_requests_are_ended(serving: Serving) -> None:
    """Cut at every sort of place, and those that go on to send a byte now and then."""
    whole = POST + BODY
    cuts = [*range(0, len(whole), 2), len(POST)]
    clients = [serving.connect() for _ in cuts]
    dripping = [serving.connect() for _ in range(10)]
    begun = time.monotonic()
    for client, cut in zip(clients, cuts, strict=True):
        client.sendall(whole[:cut])
    for at in range(12):  # for longer than the limit on a head
        time.sleep(0.1)
        for number, client in enumerate(dripping):
            try:
                client.sendall((POST if number % 2 else b"POST /early HTTP/1.1\r\nX: ")[at : at + 1])
            except ConnectionError:
                continue
    for cut, client in zip([*cuts, *[1] * 10], [*clients, *dripping], strict=True):
        said = read_until_closed(client, 5.0)
        client.close()
        expected = b"HTTP/1.1 408 " if 0 < cut < len(POST) else b""
        assert said.startswith(expected) and said.count(b"HTTP/1.1") == bool(expected), (cut, said)
    assert time.monotonic() - begun < 8.0
    assert serving.refused["head_timeout"] > 0 and serving.refused["body_timeout"] > 0
    assert set(serving.refused) <= set(REFUSALS)


@pytest.mark.slow
def test_a_body_that_nobody_reads_does_not_keep_the_connection(serving: Serving) -> None:
    with serving.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        gone = False
        begun = time.monotonic()
        while not gone and time.monotonic() - begun < 8.0:
            time.sleep(0.1)
            try:
                client.sendall(b"x")
            except ConnectionError:
                gone = True
        assert gone


@pytest.mark.slow
def test_idle_connections_are_closed(serving: Serving) -> None:
    clients = []
    for number in range(50):
        client = serving.connect()
        clients.append(client)
        for _ in range(number % 3):  # none, one or two requests before it falls silent
            client.sendall(GET)
            read_replies(client, 1)
    begun = time.monotonic()
    for client in clients:
        assert read_until_closed(client, 5.0) == b""  # no answer that a later request would take for its own
        client.close()
    assert time.monotonic() - begun < 5.0


@pytest.mark.slow
def test_a_reply_that_nobody_takes_does_not_keep_the_connection(serving: Serving) -> None:
    before = serving.refused["reply_timeout"]
    with serving.connect() as client:
        client.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 8.0
        while serving.refused["reply_timeout"] == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_a_slow_reader_gets_its_whole_reply(serving: Serving) -> None:
    """It takes longer than the limit in all, but never stops."""
    before = serving.refused["reply_timeout"]
    with serving.connect() as client:
        client.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        got = 0
        while got < len(LONG_REPLY):
            got += len(client.recv(4 << 20))
            time.sleep(0.02)
    assert got > len(LONG_REPLY) and serving.refused["reply_timeout"] == before


def test_slow_but_steady_and_persistent_clients_are_served(serving: Serving) -> None:
    before = Counter(serving.refused)
    whole = POST + BODY
    with (
        serving.connect() as client
    ):  # six requests on one connection, each within its limits, with pauses between
        for _ in range(4):
            for part in (whole[:5], whole[5:40], whole[40 : len(POST)], whole[len(POST) :]):
                client.sendall(part)
                time.sleep(0.04)
            assert read_replies(client, 1).endswith(b"read 24")
            time.sleep(0.1)
    with serving.connect() as client:
        client.sendall((POST + BODY) * 20)  # pipelined
        assert read_replies(client, 20).count(b"read 24") == 20
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=10)
    for size in (1, 100_000, 3_000_000):
        connection.request("POST", "/", b"x" * size)
        assert connection.getresponse().read() == f"read {size}".encode()
        pieces = iter([b"x" * size, b"y"])
        connection.request("POST", "/", pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().read() == f"read {size + 1}".encode()
    connection.close()
    assert serving.refused == before


def test_requests_cut_in_random_pieces_are_all_answered(serving: Serving) -> None:
    """Where the network cuts a stream of requests is no matter."""
    draw = random.Random(5)
    chunked = CHUNKED + b"5\r\nhello\r\n3;a=b\r\nyou\r\n0\r\nX-Trailer: y\r\n\r\n"
    for _ in range(40):
        kinds = [draw.choice([GET, POST + BODY, chunked]) for _ in range(draw.randint(1, 12))]
        stream = b"".join(kinds)
        expected = [{GET: b"read 0", POST + BODY: b"read 24", chunked: b"read 8"}[kind] for kind in kinds]
        with serving.connect() as client:
            while stream:
                cut = draw.choice([1, 7, 100, 5000])
                client.sendall(stream[:cut])
                stream = stream[cut:]
            said = read_replies(client, len(expected))
        parts = said.split(b"HTTP/1.1 200 OK")[1:]
        assert [part.rpartition(b"\r\n\r\n")[2] for part in parts] == expected


# --- the command line ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_sorl_serve_keeps_to_its_limits(start: Any, tmp_path: Path) -> None:
    """150 MB in one header, without a token; 50 half-sent requests and 50 idle connections."""
    (tmp_path / "token").write_text("s3cret")
    server = start(
        *("--token-file", str(tmp_path / "token"), "--max-head-kb", "8", "--head-timeout-s", "1"),
        *("--idle-timeout-s", "1", "--body-timeout-s", "1"),
    )
    good = {"Authorization": "Bearer s3cret"}
    assert server.request("POST", "/retrieve", BODY, good).status == 200
    before = server.memory_mb()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        sent = send_until_refused(client, b"POST /retrieve HTTP/1.1\r\nHost: x\r\nX-Long: ", 150 << 20)
        assert read_until_closed(client, 5.0).startswith(b"HTTP/1.1 431 ")
    assert sent < 20 << 20
    assert server.memory_mb() < before + 10
    begun = time.monotonic()
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(100)]
    for number, client in enumerate(held):
        client.sendall(POST[: 1 + number // 2] if number % 2 else GET)
    for number, client in enumerate(held):
        said = read_until_closed(client, 10.0)
        assert said.startswith(b"HTTP/1.1 408 " if number % 2 else b"HTTP/1.1 200 ")
        client.close()
    assert time.monotonic() - begun < 8.0
    text = server.request("GET", "/metrics", headers=good).body.decode()
    assert 'sorl_serve_refused_connections_total{reason="head_too_large"} 1.0' in text
    assert 'sorl_serve_refused_connections_total{reason="head_timeout"} 50.0' in text
    assert server.request("POST", "/retrieve", BODY, good).status == 200
