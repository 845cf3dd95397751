"""Limits on a connection before there is a request: the size of a request's head, and the time for each of its parts.

uvicorn has no such limits: with httptools it keeps a header of any size, and a client that sends half a request, or
nothing, keeps its connection for ever. Both happen before the application sees a request and can ask for a token. So
the limits are in the protocol class that uvicorn makes for each connection; `sorl-serve` and `sorl-serve-agent` share
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sorl_tools.serve.protocol import encode_json

if TYPE_CHECKING:
    import uvicorn

LINGER_S = 1.0  # time for a refused client to read the answer before its connection is closed
_PONG_S = 120.0  # for a client to answer a WebSocket's ping: one that trains is busy for long
_BODY_GRACE_S = 1.0  # the application answers 408 to a late body; this is for bodies that it does not read

REFUSALS = ("head_too_large", "head_timeout", "body_timeout", "reply_timeout")


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on a client before, between and after its requests.

    Attributes:
        max_head_bytes: of a request line with its headers, and of the data between two pieces of a body.
        head_timeout_s: from the connection, or from the first byte of a later request, to the end of the head.
        body_timeout_s: from the end of the head to the end of the body.
        reply_timeout_s: for the client to read a part of a reply that waits for it.
        idle_timeout_s: whole seconds between the end of a reply and the first byte of the next request.
    """

    max_head_bytes: int = 16 << 10
    head_timeout_s: float = 10.0
    body_timeout_s: float = 10.0
    reply_timeout_s: float = 30.0
    idle_timeout_s: int = 20


def limited_config(
    app: Any,
    limits: ConnectionLimits,
    on_refused: Callable[[str], None],
    *,
    drain_s: float,
    backlog: int = 2048,
    max_connections: int | None = None,
    http: type[Any] | None = None,
    max_message_bytes: int | None = None,
) -> uvicorn.Config:
    """uvicorn's settings for a server with limits on its connections.

    Args:
        app: the ASGI application.
        on_refused: called with one of ``REFUSALS`` for each connection that is closed for that reason.
        drain_s: seconds for requests in progress when the server is told to stop.
        max_connections: further connections are answered with 503.
        max_message_bytes: of a WebSocket's message; None refuses WebSockets. The limits here end where a connection
            becomes a WebSocket: the application then has to end silent ones.
        http: uvicorn's protocol class; None takes that of httptools if it is installed, and else that of h11.
    """
    import uvicorn

    return uvicorn.Config(
        app,
        http=_limited_protocol(limits, on_refused, http),
        ws="none" if max_message_bytes is None else "websockets-sansio",
        ws_max_size=max_message_bytes or 0,
        ws_ping_timeout=_PONG_S,
        ws_per_message_deflate=False,  # so that no small message becomes a large one
        h11_max_incomplete_event_size=limits.max_head_bytes,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=backlog,
        limit_concurrency=max_connections,
        timeout_keep_alive=limits.idle_timeout_s,
        timeout_graceful_shutdown=int(drain_s),
    )


def _limited_protocol(
    limits: ConnectionLimits, on_refused: Callable[[str], None], base: type[Any] | None
) -> type[asyncio.Protocol]:
    """uvicorn's protocol class with the limits; uvicorn makes an instance for each connection."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
    from uvicorn.protocols.http.h11_impl import H11Protocol

    found: type[Any] = base or AutoHTTPProtocol
    parts = (_LimitedH11,) if issubclass(found, H11Protocol) else (_LimitedHttpTools,)
    return type(
        "LimitedProtocol", (*parts, found), {"limits": limits, "on_refused": staticmethod(on_refused)}
    )


class _Limited:
    """The limits, as a mix-in for uvicorn's two protocol classes.

    A connection reads a head, then perhaps a body, then the next head, and so on. `_phase` tells which of them a
    deadline is for. The deadline is set when the phase or the request changes, so bytes that trickle in do not extend
    it.
    """

    limits: ConnectionLimits
    on_refused: Callable[[str], None]
    # attributes of uvicorn's classes
    cycle: Any
    flow: Any
    loop: asyncio.AbstractEventLoop
    transport: Any

    _head_bytes = 0  # of the head that is being read
    _silent_bytes = 0  # since the last piece of the body: chunk extensions and trailers
    _refused = False
    _upgraded = False
    _deadline: asyncio.TimerHandle | None = None
    _deadline_for: tuple[str, Any] = ("", None)
    _write_check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._write_check):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """Pass the data to the parser in pieces, so that no head can exceed its limit within a single piece."""
        while data and not self._refused and not self._upgraded and not self.transport.is_closing():
            size = len(data)
            if not self._in_body():
                size = min(size, max(self.limits.max_head_bytes - self._head_bytes, 0))
                if size == 0:
                    self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large")
                    return
            self._feed(data[:size])
            data = data[size:]
        if not self._refused and not self._upgraded and not self.transport.is_closing():
            self._watch()

    def _feed(self, piece: bytes) -> None:
        cycle, was_in_body = self.cycle, self._in_body()
        self._silent_bytes += len(piece)
        super().data_received(piece)  # type: ignore[misc]
        if self._in_body():
            self._head_bytes = 0
            if self._silent_bytes > self.limits.max_head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large")
            return
        self._silent_bytes = 0
        # A piece that ends a head or a body may also begin the next head; those first bytes are not counted.
        ended = was_in_body or self.cycle is not cycle
        self._head_bytes = 0 if ended else self._head_bytes + len(piece)

    def on_response_complete(self) -> None:
        before = self.cycle
        super().on_response_complete()  # type: ignore[misc]
        if self.cycle is not before:  # h11 had kept a complete head back until now
            self._head_bytes = 0
        self._watch()

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        for timer in (self._deadline, self._write_check):
            if timer is not None:
                timer.cancel()
        super().handle_websocket_upgrade()  # type: ignore[misc]

    def _in_body(self) -> bool:
        raise NotImplementedError

    def _phase(self) -> str:
        if self._in_body():
            return "body"
        return "head" if self._head_bytes or self.cycle is None else ""

    def _watch(self) -> None:
        """Set the deadline for the part that is being read now."""
        watched = (self._phase(), self.cycle)
        if watched == self._deadline_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline, self._deadline_for = None, watched
        if watched[0]:
            limits = self.limits
            late = limits.head_timeout_s if watched[0] == "head" else limits.body_timeout_s + _BODY_GRACE_S
            self._deadline = self.loop.call_later(late, self._end_late_request, late)

    def _end_late_request(self, late: float) -> None:
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is the server that keeps the client waiting
            self._deadline = self.loop.call_later(late, self._end_late_request, late)
        elif self._phase() == "head" and self._head_bytes:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "head_timeout")
        else:  # the client has sent nothing yet, or it has its answer and still sends the body
            self._refuse(None, "head_timeout" if self.cycle is None else "body_timeout")

    def _refuse(self, status: HTTPStatus | None, reason: str) -> None:
        """Close the connection, after an answer if none has been begun."""
        self._refused = True
        self.on_refused(reason)
        if status is not None and (self.cycle is None or self.cycle.response_complete):
            said = {
                "head_too_large": f"the request line and headers exceed {self.limits.max_head_bytes} bytes",
                "head_timeout": f"the head of the request did not arrive within {self.limits.head_timeout_s:g} s",
            }[reason]
            body = encode_json({"error": said})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.flow.pause_reading()  # nothing more is accepted
            self.transport.write_eof()  # closing at once would reset the connection before the answer is read
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self._close()

    def _close(self) -> None:
        """Close the connection once the client has read what was written, or soon in any case."""
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._check_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        if self._write_check is not None:
            self._write_check.cancel()

    def _check_writing(self, waiting: int) -> None:
        """Check again later; a client that has not read a byte by then is disconnected."""

        def look_again() -> None:
            left = self.transport.get_write_buffer_size()
            if left < waiting:
                self._check_writing(left)
            elif not self._refused:
                self._refused = True
                self.on_refused("reply_timeout")
                self.transport.abort()

        self._write_check = self.loop.call_later(self.limits.reply_timeout_s, look_again)


class _LimitedHttpTools(_Limited):
    _body_follows = False

    def on_headers_complete(self) -> None:
        self._body_follows = True
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._body_follows = False
        super().on_message_complete()  # type: ignore[misc]

    def _in_body(self) -> bool:
        return self._body_follows


class _LimitedH11(_Limited):
    conn: Any

    def _in_body(self) -> bool:
        import h11

        # h11 itself limits the data between two pieces of a body
        self._silent_bytes = 0
        return self.conn.their_state is h11.SEND_BODY
