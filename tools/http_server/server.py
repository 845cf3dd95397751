"""uvicorn with the limits that it lacks: on connections, and on clients that stall.

A client that sends half a head, or nothing, would keep its connection for ever, and so would one that reads none of its
reply. Both cost no token: the application sees neither. So once a second all connections are looked at, and those where
nothing has happened for too long are cut off.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sorl_tools.http_server.options import ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 128  # what a process opens beside its connections
_PONG_S = 120.0  # for a client to answer a WebSocket's ping: one that trains is busy for long


class Server(uvicorn.Server):
    """Serves one application in this process.

    Args:
        on_refused: called with a word for each connection that is closed for a client's fault: ``stalled``, ``head`` or
            ``full``.
        max_message_bytes: of a WebSocket's message; None refuses WebSockets.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        on_refused: Callable[[str], None] = lambda reason: None,
        max_message_bytes: int | None = None,
    ) -> None:
        most, backlog = _within_file_limit(settings.max_connections)
        limits = {
            "max_connections": most,
            "max_head_bytes": settings.max_head_bytes,
            "on_refused": staticmethod(on_refused),
        }
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Protocol", (LimitedProtocol,), limits),
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
        self._stall_timeout_s = settings.stall_timeout_s
        self._on_refused = on_refused
        # of each connection: what was seen of it last, and since when it has been so
        self._seen: dict[Any, tuple[tuple[Any, ...], float]] = {}

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

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn calls ten times a second."""
        if counter % 10 == 0:
            self._cut_off_stalled(time.monotonic())
        return await super().on_tick(counter)

    def _cut_off_stalled(self, now: float) -> None:
        seen, self._seen = self._seen, {}
        for connection in list(self.server_state.connections):
            if not isinstance(connection, LimitedProtocol):
                continue  # a WebSocket, which pings its client
            unread = connection.transport.get_write_buffer_size()
            cycle = connection.cycle
            is_answering = cycle is not None and not cycle.response_complete
            is_late = is_answering and cycle.more_body
            is_idle = connection.timeout_keep_alive_task is not None
            if unread == 0 and not is_late and (is_answering or is_idle):
                continue  # the application is at work, or uvicorn waits for the next request
            state = (cycle, is_answering, unread)
            before, since = seen.get(connection, (None, now))
            if before != state:
                since = now
            self._seen[connection] = (state, since)
            if now - since >= self._stall_timeout_s:
                if is_late and not cycle.response_started:
                    connection.refuse(b"408 Request Timeout", "stalled")
                else:
                    self._on_refused("stalled")
                    connection.transport.abort()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes a connection that comes when there are enough, and one whose head has no end.

    The parser keeps what it has read of a header, a chunk's extension or a trailer until that is whole.
    """

    max_connections: int
    max_head_bytes: int
    on_refused: Callable[[str], None]
    unparsed = 0  # bytes since the parser has last found a whole part

    def refuse(self, status: bytes, reason: str) -> None:
        """Close the connection, after an answer without a body."""
        self.on_refused(reason)
        head = b"\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 " + status + head)
        self.transport.close()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.refuse(b"503 Service Unavailable", "full")

    def data_received(self, data: bytes) -> None:
        self.unparsed += len(data)
        super().data_received(data)
        if self.unparsed > self.max_head_bytes and not self.transport.is_closing():
            self.refuse(b"431 Request Header Fields Too Large", "head")

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
    """How many connections this process can have, up to ``connections``, and how many may wait to be accepted.

    Each is an open file, and a process that may open no more can neither accept connections nor read its index. The
    limit is raised as far as that is allowed.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections, _BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _BACKLOG + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections, _BACKLOG
    backlog = min(_BACKLOG, soft // 4)  # all that wait are accepted at once
    most = max(1, min(connections, soft - backlog - _OTHER_FILES))
    if most < connections:
        logger.warning(
            "at most %d connections, because a process here may open %d files: ulimit -n", most, soft
        )
    return most, backlog
