"""``/mcp``: the search as a tool of the Model Context Protocol (streamable HTTP), served by the ``mcp`` package.

Each request stands alone (no sessions), so that any of several workers can answer it, and each reply is one JSON body.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import mcp_types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from starlette.types import Message, Receive, Scope, Send

from sorl_tools.corpus import format_passages
from sorl_tools.http_server.app import RequestError, error_response
from sorl_tools.serve.batcher import NUM_QUERIES, Batcher
from sorl_tools.serve.protocol import RequestLimits, check_queries, checked_top_k

_REFUSED = "sorl.refused"  # in a request's scope: why its call was refused as a whole


class McpRoute:
    """Serves the one tool ``search``, whose reply has the text that ``HttpSearch`` would give a policy."""

    def __init__(self, batcher: Batcher, limits: RequestLimits, max_body_bytes: int) -> None:
        self._batcher = batcher
        self._limits = limits
        server: Server[Any] = Server("sorl", on_list_tools=self._list_tools, on_call_tool=self._call_tool)
        self._manager = StreamableHTTPSessionManager(
            server, json_response=True, stateless=True, max_request_body_size=max_body_bytes
        )
        self._app = StreamableHTTPASGIApp(self._manager)

    def lifespan(self, app: Any) -> AbstractAsyncContextManager[None]:
        """Inside this context requests are answered."""
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_refused(message: Message) -> None:
            if _REFUSED not in scope:
                await send(message)

        if any(name == b"origin" for name, _ in scope["headers"]):
            # the protocol asks for this check; the guard makes it only where there is no token
            raise RequestError(403, "/mcp serves programs, not web pages: send no Origin")
        await self._app(scope, receive, send_unless_refused)
        if _REFUSED in scope:
            await error_response(scope[_REFUSED])(scope, receive, send)

    async def _list_tools(self, *_: Any) -> mcp_types.ListToolsResult:
        limits = self._limits
        query = {
            "type": "string",
            "maxLength": limits.max_query_chars,
            "description": "keywords or a question",
        }
        about_topk = f"number of passages (default: {limits.default_top_k})"
        top_k = {"type": "integer", "minimum": 1, "maximum": limits.max_top_k, "description": about_topk}
        properties = {"query": query, "topk": top_k}
        schema = {"type": "object", "properties": properties, "required": ["query"]}
        about = "Search the served corpus; returns the passages that fit the query best."
        return mcp_types.ListToolsResult(
            tools=[mcp_types.Tool(name="search", description=about, input_schema=schema)]
        )

    async def _call_tool(
        self, context: ServerRequestContext[Any, Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        scope = context.request.scope if context.request is not None else {}
        try:
            query, top_k = self._read(params)
        except RequestError as error:  # the model's mistake, which it should read
            return _text(str(error), is_error=True)
        try:
            (hits,) = await self._batcher.search([query], top_k)
        except RequestError as error:  # the server's trouble: it must look like that, not like an answer
            scope[_REFUSED] = error
            return _text(str(error), is_error=True)
        scope[NUM_QUERIES] = 1
        return _text(format_passages([hit.passage for hit in hits]).text)

    def _read(self, params: mcp_types.CallToolRequestParams) -> tuple[str, int]:
        if params.name != "search":
            raise RequestError(422, f"no tool {params.name[:60]!r} here: the only one is search")
        given = params.arguments or {}
        query, top_k = given.get("query"), given.get("topk")
        unknown = [name for name in given if name not in ("query", "topk")]
        if unknown:
            raise RequestError(422, f"search has no parameter {unknown[0][:60]!r}; there are query and topk")
        if not isinstance(query, str) or query.encode(errors="replace").decode() != query:
            raise RequestError(422, "query must be a text")  # half of a surrogate pair is none
        if top_k is not None and type(top_k) is not int:
            raise RequestError(422, "topk must be a whole number")
        check_queries([query], self._limits, "query")
        return query, checked_top_k(top_k, self._limits)


def _text(text: str, *, is_error: bool = False) -> mcp_types.CallToolResult:
    return mcp_types.CallToolResult(
        content=[mcp_types.TextContent(type="text", text=text)], is_error=is_error
    )
