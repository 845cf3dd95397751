"""A real HTTP server on the loopback interface that misbehaves on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

Reply = tuple[int, bytes] | tuple[int, bytes, str]  # status, body, and perhaps the media type
Respond = Callable[[dict[str, Any]], Reply]


class LoopbackServer(ThreadingHTTPServer):
    """Answers with ``respond``, whose status 0 drops the connection; keeps the requests it got, each with its path and
    its token."""

    daemon_threads = True
    request_queue_size = 128  # connections that come at a time; with 5, the sixth waits a second

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.health: Reply = (404, b"")  # the answer to every GET
        self.headers: Callable[[], dict[str, str]] = dict
        self.requests: list[dict[str, Any]] = []
        self.connections: set[Any] = set()
        self.encodings: set[str | None] = set()  # that the clients accept
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackServer

    def do_POST(self) -> None:
        self.server.connections.add(self.client_address)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request |= {"path": self.path, "token": self.headers["Authorization"]}
        self.server.requests.append(request)
        self.server.encodings.add(self.headers["Accept-Encoding"])
        self._answer(*self.server.respond(request))

    def do_GET(self) -> None:
        self._answer(*self.server.health)

    def _answer(self, status: int, body: bytes, media_type: str = "application/json") -> None:
        if not status:
            self.close_connection = True
            return
        try:
            self.send_response(status)
            fixed = {"Content-Length": str(len(body)), "Content-Type": media_type}
            for name, value in (fixed | self.server.headers()).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has given up

    def log_message(self, format: str, *args: Any) -> None:
        pass


# --- with OpenAI's embeddings API ---
def vector(text: str, model: str = "e5", dim: int = 16) -> list[float]:
    seed = int.from_bytes(hashlib.sha256(f"{model}{text}".encode()).digest()[:4], "big")
    return [float(number) for number in np.random.default_rng(seed).standard_normal(dim) * 7]


def embeddings(request: dict[str, Any], dim: int = 16) -> Reply:
    """What the API sends, in another order than it was asked."""
    rows = [
        {"index": i, "embedding": vector(t, request["model"], dim)} for i, t in enumerate(request["input"])
    ]
    return 200, json.dumps({"object": "list", "data": rows[::-1]}).encode()


class EmbeddingsServer(LoopbackServer):
    """It does what ``behaviours`` says next, and embeds when nothing is left."""

    def __init__(self) -> None:
        self.behaviours: list[Callable[[dict[str, Any]], Reply]] = []
        super().__init__(lambda request: (self.behaviours.pop(0) if self.behaviours else embeddings)(request))
        self.address += "/v1"
