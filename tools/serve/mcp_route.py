"""``/mcp``: the search as a tool of the Model Context Protocol (streamable HTTP), served by the ``mcp`` package.

Each request stands alone (no sessions), so that any of several workers can answer it, and each reply is one JSON body.
The bytes of a request have passed the limits of all routes before they come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sorl_tools.corpus import format_passages
from sorl_tools.serve.batcher import Batcher
from sorl_tools.serve.protocol import RequestError, RequestLimits, check_queries, checked_top_k

if TYPE_CHECKING:
    import mcp_types
    from mcp.server.context import ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_QUERIES = "sorl.queries"  # in a request's scope: how many queries its call searched for
_REFUSED = "sorl.refused"  # in a request's scope: why the call was refused as a whole


@dataclass
class McpReply:
    """What the package answers to one request; ``num_queries`` counts the queries that were searched."""

    status: int = 500
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    num_queries: int = 0


class McpRoute:
    """A server with the one tool ``search``, whose reply has the text that ``HttpSearch`` would give a policy.

    Raises:
        ImportError: the ``mcp`` package is not installed.
    """

    def __init__(self, batcher: Batcher, limits: RequestLimits) -> None:
        from mcp.server import Server

        self._batcher = batcher
        self._limits = limits
        self._server: Server[Any] = Server(
            "sorl", on_list_tools=self._list_tools, on_call_tool=self._call_tool
        )
        self._running: asyncio.Task[None] | None = None
        self._started: asyncio.Future[StreamableHTTPSessionManager] | None = None

    async def answer(self, scope: MutableMapping[str, Any], body: bytes, receive: Receive) -> McpReply:
        """Answer one request, whose whole body has been read.

        Args:
            receive: the connection's; it tells when the client is gone.

        Raises:
            RequestError: 403 for a request that a browser made for a web page; and what the search raises: 503.
        """
        headers = dict(scope["headers"])
        if b"origin" in headers:  # the protocol asks for this check against DNS rebinding
            raise RequestError(403, "/mcp serves programs, not web pages: send no Origin")
        manager = await self._manager()
        reply, scope = McpReply(), dict(scope)
        chunks: list[bytes] = []
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status, reply.headers = message["status"], tuple(message.get("headers", ()))
            else:
                chunks.append(message.get("body", b""))

        await manager.handle_request(scope, replay, send)
        if _REFUSED in scope:
            raise scope[_REFUSED]
        reply.body, reply.num_queries = b"".join(chunks), scope.get(_QUERIES, 0)
        return reply

    async def _manager(self) -> StreamableHTTPSessionManager:
        """The package's manager, started with the first request: its tasks belong to the running event loop."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._running = asyncio.create_task(self._run(self._started))
        return await asyncio.shield(self._started)

    async def _run(self, started: asyncio.Future[StreamableHTTPSessionManager]) -> None:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        manager = StreamableHTTPSessionManager(
            self._server,
            json_response=True,
            stateless=True,
            max_request_body_size=self._limits.max_body_bytes,
        )
        async with manager.run():
            started.set_result(manager)
            await asyncio.Event().wait()  # until the event loop ends and cancels this task

    async def _list_tools(self, *_: Any) -> mcp_types.ListToolsResult:
        import mcp_types

        limits = self._limits
        properties = {
            "query": {
                "type": "string",
                "maxLength": limits.max_query_chars,
                "description": "keywords or a question",
            },
            "topk": {
                "type": "integer",
                "minimum": 1,
                "maximum": limits.max_top_k,
                "description": f"number of passages (default: {limits.default_top_k})",
            },
        }
        schema = {"type": "object", "properties": properties, "required": ["query"]}
        about = "Search the served corpus; returns the passages that fit the query best."
        return mcp_types.ListToolsResult(
            tools=[mcp_types.Tool(name="search", description=about, input_schema=schema)]
        )

    async def _call_tool(
        self, context: ServerRequestContext[Any, Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        import mcp_types

        def say(text: str, *, is_error: bool = False) -> mcp_types.CallToolResult:
            return mcp_types.CallToolResult(
                content=[mcp_types.TextContent(type="text", text=text)], is_error=is_error
            )

        scope = context.request.scope if context.request is not None else {}
        try:
            query, top_k = self._read(params)
        except RequestError as error:  # the model's mistake, which it should read
            return say(str(error), is_error=True)
        try:
            (hits,) = await self._batcher.search([query], top_k)
        except RequestError as error:  # the server's trouble: it must look like that, not like an answer
            scope[_REFUSED] = error
            return say(str(error), is_error=True)
        scope[_QUERIES] = 1
        return say(format_passages([hit.passage for hit in hits]).text)

    def _read(self, params: mcp_types.CallToolRequestParams) -> tuple[str, int]:
        """The query and the number of passages. Raises RequestError if they are wrong or too large."""
        if params.name != "search":
            raise RequestError(422, f"no tool {params.name[:60]!r} here: the only one is search")
        given = params.arguments or {}
        query, top_k = given.get("query"), given.get("topk")
        unknown = [name for name in given if name not in ("query", "topk")]
        if unknown:
            raise RequestError(422, f"search has no parameter {unknown[0][:60]!r}; there are query and topk")
        if not isinstance(query, str) or (not query.isascii() and not _is_text(query)):
            raise RequestError(422, "query must be a text")
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool)):
            raise RequestError(422, "topk must be a whole number")
        check_queries([query], self._limits, "query")
        return query, checked_top_k(top_k, self._limits)


def _is_text(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which nothing could encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
