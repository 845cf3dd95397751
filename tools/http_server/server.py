"""uvicorn with the limits that it lacks: on connections, and on clients that stall.

A client that sends half a head, or nothing, would keep its connection for ever, and so would one that reads none of its
reply. Both cost no token: the application sees neither. So each connection is looked at once a second, and cut off when
it has waited for its client too long.
"""

from __future__ import annotations

import functools
import logging
import resource
import signal
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sorl_tools.http_server.options import MAX_HEAD_BYTES, ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 128  # what a process opens beside its connections
_PONG_S = 120.0  # for a client to answer a WebSocket's ping: one that trains is busy for long


class Server(uvicorn.Server):
    """Serves one application in this process. A WebSocket's message has at most ``max_message_bytes``; None refuses
    WebSockets."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, *, max_message_bytes: int | None = None
    ) -> None:
        most, backlog = _within_file_limit(settings.max_connections)
        protocol: Any = functools.partial(LimitedProtocol, most, settings.stall_timeout_s)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none" if max_message_bytes is None else "websockets-sansio",
                ws_max_size=max_message_bytes or 0,
                ws_ping_timeout=_PONG_S,
                ws_per_message_deflate=False,  # so that no small message becomes a large one
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=backlog,
                timeout_keep_alive=max(1, int(settings.stall_timeout_s)),
                timeout_graceful_shutdown=settings.drain_s,
            )
        )

    def stop(self) -> None:
        """Answer the requests in progress and end; may be called on any thread."""
        self.should_exit = True

    def serve_on(self, bound: socket.socket) -> None:
        """Serve until SIGTERM, SIGINT or ``stop``. Raises KeyboardInterrupt after a SIGINT, when all is closed."""
        # after its shutdown, uvicorn raises SIGTERM again for the handler that it found
        before = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            self.run(sockets=[bound])
        finally:
            signal.signal(signal.SIGTERM, before)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection that is one too many, that stalls, or whose head has no end. The
    parser keeps what it has read of a header, a chunk's extension or a trailer until that is whole."""

    unparsed = 0  # bytes since the parser has last found a whole part

    def __init__(self, max_connections: int, stall_timeout_s: float, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s

    def _refuse(self, status: bytes) -> None:
        head = b"\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 " + status + head)
        self.transport.close()
        self.loop.call_later(self._stall_timeout_s, self.transport.abort)  # if nobody reads the answer

    def _watch(self, before: Any, since: float) -> None:
        """Cut the client off if the connection has waited for it in the state ``before`` for too long."""
        if self not in self.connections:
            return  # it is closed, or a WebSocket, which pings its client
        cycle, unread, now = self.cycle, self.transport.get_write_buffer_size(), self.loop.time()
        is_answering = cycle is not None and not cycle.response_complete
        is_late = is_answering and cycle.more_body
        is_idle = self.timeout_keep_alive_task is not None  # uvicorn waits for the next request
        state = (cycle, is_answering, unread) if unread or is_late or not (is_answering or is_idle) else None
        if state is None or state != before:
            since = now
        if now - since < self._stall_timeout_s:
            self.loop.call_later(1.0, self._watch, state, since)
        elif is_late and not cycle.response_started:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(b"503 Service Unavailable")
        else:
            self._watch(None, self.loop.time())

    def data_received(self, data: bytes) -> None:
        self.unparsed += len(data)
        super().data_received(data)
        if self.unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        self.unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.unparsed = 0
        super().on_message_complete()


def _within_file_limit(connections: int) -> tuple[int, int]:
    """How many connections this process can have, up to ``connections``, and how many may wait to be accepted. Each is
    an open file, and a process that may open no more can neither accept connections nor read its index. The limit is
    raised as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _BACKLOG + _OTHER_FILES
    if 0 <= soft < wanted:  # a negative limit is none
        soft = min(wanted, hard) if hard >= 0 else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < 0 or soft >= wanted:
        return connections, _BACKLOG
    backlog = min(_BACKLOG, soft // 4)  # all that wait are accepted at once
    most = max(1, min(connections, soft - backlog - _OTHER_FILES))
    if most < connections:
        logger.warning("at most %d connections, because a process may open %d files: ulimit -n", most, soft)
    return most, backlog
