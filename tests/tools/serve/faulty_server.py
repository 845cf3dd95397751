"""A server that does what servers should not, for the tests of the client."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Callable

from sorl_tools.search.http import MAX_REPLY_BYTES

GOOD = json.dumps(
    {"result": [[{"document": {"id": "1", "contents": '"Mozart"\nborn'}, "score": 1.0}]]}
).encode()

Behaviour = Callable[[socket.socket], None]


def answer(status: str = "200 OK", body: bytes = GOOD, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class FaultyServer:
    """A TCP server that does to each request what ``behaviours`` says next, and answers well when nothing is left."""

    def __init__(self) -> None:
        self.behaviours: list[Behaviour] = []
        self.requests: list[float] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/retrieve"
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                while read_request(client):
                    with self._lock:
                        self.requests.append(time.monotonic())
                        behave = self.behaviours.pop(0) if self.behaviours else None
                    if behave is None:
                        client.sendall(answer())
                    else:
                        behave(client)
                        return
        except OSError:
            pass

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # a thread that accepts would keep it open
        self._listening.close()


def read_request(client: socket.socket) -> bytes:
    """A request, or a reply; empty when the other side has closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: *(\d+)", head.lower())
    length = int(found[1]) if found else 0
    while len(body) < length:
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.close()


def hang(client: socket.socket) -> None:
    client.settimeout(5)
    client.recv(1)


def drip(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(100):
        client.sendall(b" ")
        time.sleep(0.05)


def send(data: bytes) -> Behaviour:
    return lambda client: client.sendall(data)


# These end only with the client's patience. For all others a client may wait as long as a busy machine needs.
HANGING = ("no reply", "a dripping reply")
FAULTS: dict[str, Behaviour] = {
    "closed without a word": lambda client: None,
    "reset": reset,
    "no reply": hang,
    "a dripping reply": drip,
    "half a body": send(answer()[:-20]),
    "half a head": send(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "no HTTP": send(b"\x15\x03\x03\x00\x02\x02\x28"),
    "no JSON": send(answer(body=b"<html>")),
    "not UTF-8": send(answer(body=b'{"result": [["\xff"]]}')),
    "deep JSON": send(answer(body=b'{"result": ' + b"[" * 200_000)),
    "wrong length": send(answer(body=b'{"result": []}')),
    "500": send(answer("500 Internal Server Error", b"out of memory")),
    "502": send(answer("502 Bad Gateway", b"")),
    "503": send(answer("503 Service Unavailable", b"")),
    "429": send(answer("429 Too Many Requests", b"")),
    "more than anybody reads": send(answer(body=GOOD + b" " * MAX_REPLY_BYTES)),
    "compressed, to any size": send(answer("200 OK", gzip.compress(GOOD), "Content-Encoding: gzip")),
    "bad gzip": send(answer("200 OK", b"no gzip", "Content-Encoding: gzip")),
    "two lengths": send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
}
