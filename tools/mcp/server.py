"""An MCP server (an address, a command, or an object in this process), used from any thread.

Calls have a deadline, and a connection that failed is replaced. The client of the ``mcp`` package is asynchronous, and
a connection must be closed by the task that opened it. So each connection is held by a task of its own, in a thread
with an event loop (anyio's ``BlockingPortal``) that all servers of the process share.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from anyio.from_thread import BlockingPortal

from sorl_env.errors import UserError, http_address, install_command
from sorl_env.tool import ToolInputError, ToolUnavailableError

if TYPE_CHECKING:
    import httpx2
    import mcp_types
    from anyio.abc import TaskStatus
    from mcp import Client

TOKEN_VARIABLE = "SORL_MCP_TOKEN"
MAX_REPLY_BYTES = 16 << 20  # a policy reads some kilobytes of it
_TIMEOUT_S = 3600.0  # the deadline of each call is kept by the caller


class Target:
    """An MCP server that can be connected to, any number of times. ``server`` is an ``http(s)://`` address (streamable
    HTTP), a command that speaks MCP on its standard input and output, or a server object of the ``mcp`` package, which
    runs in this process. Raises ``UserError`` if the package ``mcp`` is missing, or the text is neither an address nor
    a command that exists."""

    def __init__(self, server: Any) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise UserError(f"MCP tools need the package mcp ({error}): {install_command('mcp')}") from error
        self._server = server
        self._command: list[str] = []
        if not isinstance(server, str):
            self.name = f"{type(server).__name__} {getattr(server, 'name', '')}".strip()
        elif server.startswith(("http://", "https://")):
            address = http_address(server, "mcp", "http://127.0.0.1:8301/mcp")
            self.name = str(address.copy_with(userinfo=b""))
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


MAX_PAGES = 100  # of a listing of tools
CLOSE_S = 8.0  # a command gets about six seconds to end before it is killed
_MAX_REASON_CHARS = 500
_lock = threading.Lock()
_ending: set[concurrent.futures.Future[Any]] = set()  # connections that are being closed
os.register_at_fork(after_in_child=_ending.clear)  # another process closes those


@atexit.register
def _wait_for_ends() -> None:
    """Otherwise a command that ends slowly would outlive this process."""
    concurrent.futures.wait(_ending, CLOSE_S + 1.0)


@functools.cache
def _portal_of(pid: int) -> BlockingPortal:
    """The event loop of a process, in a daemon thread; a fork does not inherit the thread, and gets one of its own."""
    made: concurrent.futures.Future[BlockingPortal] = concurrent.futures.Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            made.set_result(portal)
            await portal.sleep_until_stopped()

    threading.Thread(target=anyio.run, args=(serve,), name="sorl-mcp", daemon=True).start()
    return made.result()


class _Connection:
    """One connection and the task that holds it. Raises what connecting raises."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.in_use = 0
        with _lock:
            self._portal = _portal_of(os.getpid())
        self._done = anyio.Event()
        self._task, self._client = self._portal.start_task(self._hold, target, timeout_s)

    async def _hold(self, target: Target, timeout_s: float, *, task_status: TaskStatus[Client]) -> None:
        with anyio.fail_after(timeout_s) as scope:
            async with target.connect() as client:
                scope.deadline = math.inf
                task_status.started(client)
                await self._done.wait()
                scope.deadline = anyio.current_time() + CLOSE_S

    def run(self, work: Callable[[Client], Awaitable[Any]], timeout_s: float) -> Any:
        """The result of ``work``. Raises ``concurrent.futures.TimeoutError``, and what the work raises."""
        future = self._portal.start_task_soon(work, self._client)
        try:
            return future.result(max(0.0, timeout_s))
        finally:
            future.cancel()

    def close(self, *, wait: bool = False) -> None:
        """End the connection; one that does not end within ``CLOSE_S`` is given up."""
        self._portal.start_task_soon(self._done.set)
        _ending.add(self._task)
        self._task.add_done_callback(_ending.discard)
        if wait:
            concurrent.futures.wait([self._task], CLOSE_S + 1.0)


class McpServer:
    """A server, with one connection at a time. After a failed call the connection is given up: calls in progress keep
    it to their end, later ones get a new one, and a command is started again. For ``server`` see ``Target``;
    ``timeout_s`` is for each call, and for connecting. A server that ``keeps_state`` remembers earlier calls. After a
    failed call it is then out for good, because a new connection would have forgotten them."""

    def __init__(self, server: Any, timeout_s: float = 30.0, *, keeps_state: bool = False) -> None:
        self.target = server if isinstance(server, Target) else Target(server)
        self.timeout_s = timeout_s
        self.keeps_state = keeps_state
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._lost: str | None = None

    def call(self, name: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool and wait for its result. Raises ToolInputError if the server refused the arguments, and
        ToolUnavailableError without a connection, after a time-out, or if the reply breaks the protocol."""
        result: mcp_types.CallToolResult = self._use(lambda client: client.call_tool(name, dict(arguments)))
        return result

    def list_tools(self) -> tuple[list[mcp_types.Tool], str]:
        """The server's tools, and its name and version. Raises as ``call`` does."""

        async def read(client: Client) -> tuple[list[mcp_types.Tool], str]:
            tools: list[mcp_types.Tool] = []
            cursor: str | None = None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            else:
                raise ToolUnavailableError(f"{self.target.name}: its list of tools does not end")
            info = client.server_info
            return tools, "" if info is None else f"{info.name} {info.version}".strip()

        listed: tuple[list[mcp_types.Tool], str] = self._use(read)
        return listed

    def close(self, *, wait: bool = True) -> None:
        """Close the connection, and end the process of a command; without ``wait`` in the background."""
        if not wait and self._lock.locked():  # a thread is connecting, which takes up to ``timeout_s``
            threading.Thread(target=self.close, daemon=True).start()
            return
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            connection.close(wait=wait)

    def _use(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        from mcp import MCPError
        from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND

        if self._lost is not None:
            said = f"{self.target.name}: {self._lost}; what it knew of the episode is lost"
            raise ToolUnavailableError(said)
        ends_at = time.monotonic() + self.timeout_s
        connection: _Connection | None = None
        keep = False
        try:
            connection = self._connected()
            result = connection.run(work, ends_at - time.monotonic())
            keep = True
            return result
        except MCPError as error:
            keep = error.code in (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND)
            if error.code == INVALID_PARAMS:
                raise ToolInputError(str(error)) from error
            raise self._outage(error) from error
        except ToolUnavailableError:
            raise
        except Exception as error:
            raise self._outage(error) from error
        finally:
            if connection is not None:
                self._leave(connection, keep=keep)

    def _connected(self) -> _Connection:
        with self._lock:
            if self._pid != os.getpid():  # after a fork: the connection is the parent's
                self._pid, self._connection = os.getpid(), None
            if self._connection is None:
                self._connection = _Connection(self.target, self.timeout_s)
            self._connection.in_use += 1
            return self._connection

    def _leave(self, connection: _Connection, *, keep: bool) -> None:
        with self._lock:
            connection.in_use -= 1
            if self._connection is connection and not keep:
                self._connection = None
            is_over = self._connection is not connection and not connection.in_use
        if is_over:
            connection.close()

    def _outage(self, error: Exception) -> ToolUnavailableError:
        if self.keeps_state and self._connection is not None:
            self._lost = f"a call failed ({_say(error)})"
        if isinstance(error, (TimeoutError, concurrent.futures.TimeoutError)):
            return ToolUnavailableError(f"{self.target.name}: no reply within {self.timeout_s:g} s")
        return ToolUnavailableError(f"{self.target.name}: {_say(error)}")


def _say(error: BaseException) -> str:
    """An error in words. Of a group, whose own message says only how many there are, the first one."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARS]}".rstrip(": ")
