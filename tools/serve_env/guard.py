"""What OpenEnv's server does not do: tokens, and an end for clients that hold a place and say nothing."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_OPEN = ("/health",)
_TRY_LATER, _TOO_LARGE, _LATE, _WRONG_TOKEN = 1001, 413, 408, 401


class Guard:
    """An ASGI application around another one.

    Args:
        token: if given, everything but ``/health`` requires ``Authorization: Bearer TOKEN``.
        idle_s: a WebSocket without a message for so long is closed, and its episode given up.
        max_body_bytes, body_timeout_s: of the body of an HTTP request, and for it to arrive.
    """

    def __init__(
        self, app: App, *, token: str | None, idle_s: float, max_body_bytes: int, body_timeout_s: float
    ) -> None:
        self._app = app
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._idle_s = idle_s
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._may_enter(scope):
            await _refuse(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._app(scope, self._until_idle(receive), send)
        else:
            await self._with_body(scope, receive, send)

    def _may_enter(self, scope: MutableMapping[str, Any]) -> bool:
        if self._authorization is None or (scope["type"] == "http" and scope["path"] in _OPEN):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._authorization)

    def _until_idle(self, receive: Receive) -> Receive:
        """``receive``, which after ``idle_s`` without a message says that the client has left."""

        async def next_message() -> Message:
            try:
                return await asyncio.wait_for(receive(), self._idle_s)
            except asyncio.TimeoutError:
                return {"type": "websocket.disconnect", "code": _TRY_LATER}

        return next_message

    async def _with_body(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Read the body first, within its limits, and then pass it on as one piece."""
        body = bytearray()

        async def read() -> bool:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                body.extend(message.get("body", b""))
                if len(body) > self._max_body_bytes:
                    await _answer(send, _TOO_LARGE, b'{"error": "the body is too large"}')
                    return False
                if not message.get("more_body", False):
                    return True

        try:
            if not await asyncio.wait_for(read(), self._body_timeout_s):
                return
        except asyncio.TimeoutError:
            await _answer(send, _LATE, b'{"error": "the body did not arrive in time"}')
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)


async def _refuse(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send(
            {"type": "websocket.close", "code": 1008}
        )  # before it is accepted: the client sees HTTP 403
        return
    await _answer(send, _WRONG_TOKEN, b'{"error": "send Authorization: Bearer TOKEN"}')


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
