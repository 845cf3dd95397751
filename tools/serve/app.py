"""The service as a Starlette application: ``/retrieve``, ``/mcp``, ``/health``, ``/ready`` and ``/metrics``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sorl_tools.http_server.app import Guard, RequestError, make_app
from sorl_tools.http_server.options import ServerSettings
from sorl_tools.serve.batcher import Batcher
from sorl_tools.serve.metrics import NUM_QUERIES, Metrics
from sorl_tools.serve.protocol import RequestLimits, encode_result, parse_request

FINGERPRINT_HEADER = "x-sorl-fingerprint"


def search_app(
    batcher: Batcher,
    facts: Mapping[str, Any],
    metrics: Metrics,
    limits: RequestLimits,
    settings: ServerSettings,
    *,
    mcp: bool = False,
) -> ASGIApp:
    """One worker's application.

    Args:
        facts: what ``/health`` says about the index; ``fingerprint`` identifies its content.
        mcp: whether ``/mcp`` is served, which needs the ``mcp`` package.
    """

    async def retrieve(request: Request) -> Response:
        asked = parse_request(await request.body(), limits)
        found = await batcher.search(asked.queries, asked.top_k)
        request.scope[NUM_QUERIES] = len(asked.queries)
        headers = {FINGERPRINT_HEADER: str(facts["fingerprint"])}
        return Response(encode_result(found, asked), headers=headers, media_type=asked.content_type)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "ready": True, "pid": os.getpid(), **facts})

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": True})

    async def expose(request: Request) -> Response:
        return Response(metrics.expose(), media_type=metrics.content_type)

    async def no_mcp(request: Request) -> Response:
        raise RequestError(404, "this server has no /mcp: start it with --mcp")

    answer_mcp: Any = no_mcp
    if mcp:
        from sorl_tools.serve.mcp_route import McpRoute

        answer_mcp = McpRoute(batcher, limits, settings.max_body_bytes)
    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/mcp", answer_mcp, methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", expose),
    ]
    app = make_app(routes, lifespan=answer_mcp.lifespan if mcp else None)
    return _Counted(Guard(app, settings, open_paths=("/health", "/ready")), metrics)


class _Counted:
    """Counts the answers to searches, those of the guard included."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ("/retrieve", "/mcp"):
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, send_noting)
        if status:  # else the client had left
            self._metrics.answered(status, scope.get(NUM_QUERIES, 0), time.monotonic() - started)
