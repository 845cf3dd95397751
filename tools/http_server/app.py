"""A Starlette application with one form of errors, behind a guard: who may ask, and how large a request may be.

A server without a token trusts whoever reaches it. On loopback these are the programs of this machine, but also every
web page that its browser shows: a page may post to any address, open a WebSocket to it, and, once its own name is made
to resolve to 127.0.0.1, read the replies. A browser says in ``Origin`` which page asks, and in ``Host`` for which name.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from sorl_tools.http_server.options import MAX_HEAD_BYTES, ServerSettings, is_loopback

logger = logging.getLogger(__name__)

BUG = "a bug in the server; its log has the traceback"
_POLICY_VIOLATION, _TRY_LATER = 1008, 1001  # codes that close a WebSocket


class RequestError(Exception):
    """A request that is answered with ``status`` and the message; ``retry_after_s`` is sent as Retry-After."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


ErrorContent = Callable[[RequestError], Any]


def plain_content(error: RequestError) -> dict[str, str]:
    """The body of an error's answer, before it is JSON."""
    return {"error": str(error)}


def error_response(error: RequestError, content: ErrorContent = plain_content) -> Response:
    """The answer to a request that raised ``error``."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (400, 431):  # what follows may be another part of it, which must not be answered
        headers["connection"] = "close"
    return JSONResponse(content(error), error.status, headers)


def make_app(
    routes: Sequence[Route], content: ErrorContent = plain_content, *, lifespan: Lifespan[Any] | None = None
) -> Starlette:
    """An application that answers a ``RequestError``, a wrong path and a bug with ``content`` as JSON."""
    known = ", ".join(f"{'GET' if 'GET' in (r.methods or ()) else 'POST'} {r.path}" for r in routes)

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            said = f"there is no {request.method} {request.url.path[:100]} here, only {known}"
            error = RequestError(error.status_code, said)
        elif not isinstance(error, RequestError):
            error = RequestError(500, BUG)  # the guard logs it
        return error_response(error, content)

    handlers = dict.fromkeys((RequestError, HTTPException, Exception), on_error)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


class Guard:
    """An ASGI application around another one, which gets each body whole. Paths in ``open_paths`` need no token, so
    that a probe can ask them; ``content`` makes the body of an error's answer. A WebSocket without a message for
    ``websocket_idle_s`` is closed."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        open_paths: Collection[str] = ("/health",),
        content: ErrorContent = plain_content,
        websocket_idle_s: float | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._open_paths = open_paths
        self._content = content
        self._websocket_idle_s = websocket_idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._open_websocket(scope, receive, send)

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def next_message() -> Message:
            try:
                with anyio.fail_after(self._websocket_idle_s):
                    return await receive()
            except TimeoutError:
                return {"type": "websocket.disconnect", "code": _TRY_LATER}

        try:
            self._check_sender(scope)
        except RequestError as error:  # before it is accepted: the client sees the status 403
            await WebSocketClose(_POLICY_VIOLATION, str(error))(scope, receive, send)
        else:
            await self._app(scope, next_message, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            body = await self._read_body(self._check_sender(scope), receive)
            if body is not None:
                await self._app(scope, _with_body(body, receive), send_noting)
            return
        except RequestError as raised:
            error = raised
        except asyncio.CancelledError:  # the time that requests get when the server ends is over
            error = RequestError(503, "the server is stopping", retry_after_s=1)
        except Exception:
            logger.exception("a bug: %s raised", scope["path"])
            error = RequestError(500, BUG)
        if not begun:
            await error_response(error, self._content)(scope, receive, send)

    def _check_sender(self, scope: Scope) -> Mapping[bytes, bytes]:
        """The headers of a request. Raises RequestError unless whoever sends it may ask."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            raise RequestError(431, f"the headers exceed {MAX_HEAD_BYTES} bytes")
        headers = dict(scope["headers"])
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise RequestError(400, "a request has one Host")
        token = self._settings.token
        if token is None:
            self._check_for_web_pages(headers)
        elif scope["path"] not in self._open_paths or scope["type"] != "http":
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(_token_of(given), token.encode()):
                raise RequestError(401, "wrong token" if given else "send Authorization: Bearer TOKEN")
        return headers

    def _check_for_web_pages(self, headers: Mapping[bytes, bytes]) -> None:
        own, host = self._settings.host, headers.get(b"host", b"").decode("latin-1")
        if is_loopback(own) and not _names_this_machine(host, own):
            said = (
                f"Host is {host[:100]!r}, not this machine: for requests under other names give --token_file"
            )
            raise RequestError(403, said)
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2].lower() != host.lower().encode("latin-1"):
            said = "this serves programs, not web pages: send no Origin, or give --token_file"
            raise RequestError(403, said)

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client has left. Raises RequestError if it is too large. The rest of a body that
        is too large is read and dropped, so that its sender reads the answer. The server ends a connection whose body
        does not arrive."""
        limit = self._settings.max_body_bytes
        too_large = RequestError(413, f"the body is above {limit} bytes: send less at once")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large
            if not message.get("more_body"):
                return bytes(body)


def _with_body(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


def _token_of(authorization: bytes) -> bytes:
    """The token in an Authorization header: after ``Bearer``, or the password in ``Basic``; empty if there is none.
    Clients that can send no header of their own send ``Basic`` for an address ``http://any:TOKEN@host``."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


@lru_cache(64)
def _names_this_machine(host: str, own: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == own or is_loopback(name)
