"""A Starlette application whose errors are all answered in one way, and those answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan

from sorl_tools.http_server.errors import RequestError

BUG = "a bug in the server; its log has the traceback"
Content = Callable[[RequestError], Any]


def plain_content(error: RequestError) -> dict[str, str]:
    """The body of an error's answer, before it is JSON."""
    return {"error": str(error)}


def error_response(error: RequestError, content: Content = plain_content) -> Response:
    """The answer to a request that raised ``error``."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.closes:
        headers["connection"] = "close"
    return Response(json.dumps(content(error)), error.status, headers, "application/json")


def make_app(
    routes: Sequence[Route], content: Content = plain_content, *, lifespan: Lifespan[Any] | None = None
) -> Starlette:
    """An application that answers a ``RequestError``, a wrong path and a bug with ``content`` as JSON."""
    known = ", ".join(f"{_method(route)} {route.path}" for route in routes)

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error, content)

    async def on_wrong_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = f"there is no {request.method} {request.url.path[:100]} here, only {known}"
        return error_response(RequestError(error.status_code, said), content)

    async def on_bug(request: Request, error: Exception) -> Response:
        return error_response(RequestError(500, BUG), content)  # the guard logs it

    handlers: Any = {RequestError: on_request_error, HTTPException: on_wrong_path, Exception: on_bug}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


def _method(route: Route) -> str:
    return "GET" if "GET" in (route.methods or ()) else "POST"
