"""Where an MCP server is: an address, a command, or an object in this process; and the client that reaches it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from sorl_env.errors import UserError

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

TOKEN_VARIABLE = "SORL_MCP_TOKEN"
MAX_REPLY_BYTES = 16 << 20  # a policy reads some kilobytes of it
_TIMEOUT_S = 3600.0  # the deadline of each call is kept by the caller


class Target:
    """An MCP server that can be connected to, any number of times.

    Args:
        server: an ``http(s)://`` address (streamable HTTP), a command that speaks MCP on its standard input and output,
            or a server object of the ``mcp`` package, which runs in this process.

    Raises:
        UserError: the package ``mcp`` is missing, or the text is neither an address nor a command that exists.
    """

    def __init__(self, server: Any) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise UserError(f"MCP tools need the package mcp ({error}): pip install 'sorl[mcp]'") from error
        self._server = server
        self._command: list[str] = []
        if not isinstance(server, str):
            self.name = f"{type(server).__name__} {getattr(server, 'name', '')}".strip()
        elif server.startswith(("http://", "https://")):
            self.name = _checked_address(server)
        else:
            self._command = _split(server)
            self.name = server

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A connected client. For a command, leaving it ends the process."""
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp_types import Implementation

        async with AsyncExitStack() as stack:
            server: Any = self._server
            if self._command:
                # sys.stderr may have been replaced by something that is not a file
                log: Any = sys.__stderr__ if sys.__stderr__ is not None else subprocess.DEVNULL
                command = StdioServerParameters(command=self._command[0], args=self._command[1:])
                server = stdio_client(command, errlog=log)
            elif isinstance(server, str):
                http = await stack.enter_async_context(limited_client())
                server = streamable_http_client(server, http_client=http)
            # no kept replies: what a call returns must not depend on earlier calls of other episodes
            client = Client(server, client_info=Implementation(name="sorl", version="1"), cache=None)
            yield await stack.enter_async_context(client)


def limited_client() -> httpx2.AsyncClient:
    """A client that sends the environment's token, and whose replies end with an error at ``MAX_REPLY_BYTES``."""
    import httpx2

    class LimitedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._stream:
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    raise httpx2.StreamError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def limit(response: httpx2.Response) -> None:
        # a small compressed body can unpack to any size
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.RemoteProtocolError("the reply is compressed, although a plain one was asked for")
        response.stream = LimitedStream(response.stream)

    token = os.environ.get(TOKEN_VARIABLE)
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        timeout=httpx2.Timeout(_TIMEOUT_S, connect=5.0),
        event_hooks={"response": [limit]},
    )


def _checked_address(address: str) -> str:
    """The address without a user name and password. Raises UserError if it is none."""
    import httpx

    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise UserError(f"mcp:{address}: not an address ({error})") from error
    if not url.host:
        raise UserError(
            f"mcp:{address}: the address has no host; give one such as mcp:http://127.0.0.1:8301/mcp"
        )
    return str(url.copy_with(userinfo=b""))


def _split(command: str) -> list[str]:
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise UserError(f"mcp:{command}: not a command ({error})") from error
    if not parts:
        raise UserError("mcp: gives no server: write mcp:http://HOST:PORT/mcp, or mcp:COMMAND")
    if shutil.which(parts[0]) is None:
        raise UserError(f"mcp:{command}: there is no program {parts[0]!r}; install it, or give its path")
    return parts
