"""The service as an ASGI application: ``/retrieve``, ``/mcp``, ``/health``, ``/ready`` and ``/metrics``.

This is plain ASGI on uvicorn. There are few routes, and a framework's routing, request objects and validation would
take longer than the search of a small batch. mosec, whose front end is written in Rust, needs a third of the time for
a small request, but it does not pass headers on from its workers (so there is no token) and cannot send 401 or
Retry-After. LitServe sends each request through another process. Neither counts queries when it fills a batch.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import anyio

from sorl_tools.serve.batcher import Batcher
from sorl_tools.serve.mcp_route import McpRoute
from sorl_tools.serve.metrics import Metrics
from sorl_tools.serve.protocol import RequestError, RequestLimits, encode_json, encode_result, parse_request

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FINGERPRINT_HEADER = "x-sorl-fingerprint"
_JSON = b"application/json"
_METHODS = {"/retrieve": "POST", "/mcp": "POST", "/health": "GET", "/ready": "GET", "/metrics": "GET"}
_SEARCHES = ("/retrieve", "/mcp")


class _GoneError(Exception):
    """The client disconnected before it had sent its request."""


@dataclass(frozen=True)
class _Reply:
    body: bytes
    status: int = 200
    content_type: bytes = _JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    num_queries: int = 0


class App:
    """One worker's application.

    Args:
        token: if given, all routes but the probes require ``Authorization: Bearer TOKEN``, or the token as the password
            of ``Basic``: clients that can send no header send that for an address ``http://any:TOKEN@host``.
        mcp: answers ``/mcp``; None for a server without that route.
        body_timeout_s: time for the whole body of a request to arrive; after that the answer is 408.
    """

    def __init__(
        self,
        batcher: Batcher,
        metrics: Metrics,
        limits: RequestLimits,
        *,
        token: str | None = None,
        mcp: McpRoute | None = None,
        body_timeout_s: float = 10.0,
    ) -> None:
        self._batcher = batcher
        self._metrics = metrics
        self._limits = limits
        self._token = None if token is None else token.encode()
        self._mcp = mcp
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not supported")
        started = time.monotonic()
        path = scope["path"]
        try:
            reply = await self._route(path, scope, receive)
        except _GoneError:
            return
        except RequestError as error:
            reply = _error(error)
        except Exception:
            logger.exception("a bug in sorl-serve: %s raised", path)
            reply = _error(RequestError(500, "a bug in the server; its log has the traceback"))
        if path in _SEARCHES:
            self._metrics.answered(reply.status, reply.num_queries, time.monotonic() - started)
        headers = [
            (b"content-type", reply.content_type),
            (b"content-length", b"%d" % len(reply.body)),
            *reply.headers,
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _route(self, path: str, scope: MutableMapping[str, Any], receive: Receive) -> _Reply:
        method = _METHODS.get(path)
        if method is None:
            raise RequestError(404, f"no {path[:100]} here: {', '.join(_METHODS)}")
        if scope["method"] not in (method, "HEAD" if method == "GET" else method):
            raise RequestError(405, f"{path} takes {method}")
        if path == "/health":
            failed = self._batcher.failure is not None
            state = {"status": "failed" if failed else "ok", "ready": self._batcher.ready, "pid": os.getpid()}
            return _Reply(encode_json(state | self._facts()), 503 if failed else 200)
        if path == "/ready":
            ready = self._batcher.ready
            return _Reply(encode_json({"ready": ready}), 200 if ready else 503)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._check_token(headers)
        if path == "/metrics":
            return _Reply(self._metrics.expose(), content_type=self._metrics.content_type.encode())
        if path == "/mcp":
            return await self._answer_mcp(scope, headers, receive)
        request = parse_request(await self._read_body(headers, receive), self._limits)
        results = await self._batcher.search(request.queries, request.top_k)
        fingerprint = str(self._facts().get("fingerprint")).encode()
        return _Reply(
            encode_result(results, request),
            content_type=request.content_type,
            headers=((FINGERPRINT_HEADER.encode(), fingerprint),),
            num_queries=len(request.queries),
        )

    async def _answer_mcp(
        self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes], receive: Receive
    ) -> _Reply:
        if self._mcp is None:
            raise RequestError(404, "this server has no /mcp: start it with --mcp")
        said = await self._mcp.answer(scope, await self._read_body(headers, receive), receive)
        own = (b"content-type", b"content-length")  # written with every reply
        return _Reply(
            said.body,
            said.status,
            dict(said.headers).get(b"content-type", _JSON),
            tuple(header for header in said.headers if header[0] not in own),
            said.num_queries,
        )

    def _facts(self) -> dict[str, Any]:
        backend = self._batcher.backend
        return {} if backend is None else backend.facts

    def _check_token(self, headers: dict[bytes, bytes]) -> None:
        if self._token is None:
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(_token_of(given), self._token):
            raise RequestError(401, "wrong token" if given else "send Authorization: Bearer TOKEN")

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.max_body_bytes
        length = headers.get(b"content-length", b"")
        # the rest of a body that is too large is read and dropped, so that its sender reads the answer
        too_large = RequestError(413, f"the body is above {limit} bytes: split the request")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            with anyio.fail_after(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    chunk: bytes = message.get("body", b"")
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    chunks.append(chunk)
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {self._body_timeout_s:g} s") from None


def _token_of(authorization: bytes) -> bytes:
    """The token in an Authorization header: after ``Bearer``, or the password in ``Basic``; empty if there is none."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _error(error: RequestError) -> _Reply:
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 408:
        headers.append((b"connection", b"close"))  # the rest of the body is no request
    return _Reply(encode_json({"error": str(error)}), error.status, headers=tuple(headers))
