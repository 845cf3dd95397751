"""A connection to an MCP server, used from any thread: calls with a deadline, and a new connection after a failure.

The client of the ``mcp`` package is asynchronous, and a connection must be closed by the task that opened it. So each
connection is held by a task of its own, on an event loop in a thread that all servers of the process share.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sorl_env.tool import ToolInputError, ToolUnavailableError
from sorl_tools.mcp.target import Target

if TYPE_CHECKING:
    import mcp_types
    from mcp import Client

logger = logging.getLogger(__name__)

MAX_PAGES = 100  # of a listing of tools
MAX_TOOLS = 1000
CLOSE_S = 8.0  # a command gets about six seconds to end before it is killed
_MAX_REASON_CHARS = 500

_Result = TypeVar("_Result")


class _LoopThread:
    """An event loop that runs in a daemon thread, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def get(self) -> asyncio.AbstractEventLoop:
        """The running loop of this process; a fork does not inherit the thread, and gets a loop of its own."""
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="sorl-mcp", daemon=True).start()
            return self._loop


_loop_thread = _LoopThread()


class _Connection:
    """One connection and the task that holds it. All members belong to the loop's thread."""

    def __init__(self, target: Target) -> None:
        self.in_use = 0
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._hold(target))

    async def _hold(self, target: Target) -> None:
        try:
            async with target.connect() as client:
                self.client.set_result(client)
                await self._done.wait()
        except BaseException as error:  # passed to those who wait for the client; later ones see failed calls
            if self.client.done():
                logger.debug("the connection to %s ended", target.name, exc_info=error)
            else:
                self.client.set_exception(
                    error if isinstance(error, Exception) else ConnectionError("closed")
                )
                self.client.exception()  # nobody may be waiting any more
            if not isinstance(error, Exception):
                raise

    async def close(self) -> None:
        """End the connection; one that does not end in time is given up."""
        self._done.set()
        if not self.client.done():
            self._task.cancel()  # it is still being made
        await asyncio.wait({self._task}, timeout=CLOSE_S)
        if not self._task.done():
            self._task.cancel()


class McpServer:
    """A server, with one connection at a time.

    After a failed call the connection is given up: calls in progress keep it to their end, later ones get a new one,
    and a command is started again.

    Args:
        server: see ``Target``.
        timeout_s: for each call, and for connecting.
        keeps_state: the server remembers earlier calls. After a failed call it is then out for good, because a new
            connection would have forgotten them.
    """

    def __init__(self, server: Any, timeout_s: float = 30.0, *, keeps_state: bool = False) -> None:
        self.target = server if isinstance(server, Target) else Target(server)
        self.timeout_s = timeout_s
        self.keeps_state = keeps_state
        self._pid = os.getpid()
        self._connection: _Connection | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._lost: str | None = None
        self._called = False

    def call(self, name: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool and wait for its result.

        Raises:
            ToolInputError: the server refused the arguments.
            ToolUnavailableError: no connection, a time-out, or a reply that breaks the protocol.
        """
        return self._wait(self._call(name, arguments))

    async def acall(self, name: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        """``call`` for an event loop of the caller's."""
        return await asyncio.wrap_future(self._submit(self._call(name, arguments)))

    def list_tools(self) -> tuple[list[mcp_types.Tool], str]:
        """The server's tools, and its name and version. Raises ToolUnavailableError as ``call`` does."""
        return self._wait(self._list())

    def close(self) -> None:
        """Close the connection, and end the process of a command."""
        if self._pid == os.getpid() and self._connection is not None:
            connection, self._connection = self._connection, None
            self._wait(connection.close())

    def _submit(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        if self._pid != os.getpid():  # after a fork: the connection is the parent's
            self._pid, self._connection = os.getpid(), None
        return asyncio.run_coroutine_threadsafe(work, _loop_thread.get())

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = self._submit(work)
        try:
            # longer than any deadline inside, in case a server in this process blocks the loop
            return future.result(self.timeout_s + CLOSE_S + 1.0)
        except concurrent.futures.TimeoutError as error:
            raise ToolUnavailableError(f"{self.target.name}: no reply within {self.timeout_s:g} s") from error
        finally:
            future.cancel()

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        try:
            return await self._use(lambda client: client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolInputError(str(error)) from error
            raise self._outage(error) from error

    async def _list(self) -> tuple[list[mcp_types.Tool], str]:
        from mcp import MCPError

        async def read(client: Client) -> tuple[list[mcp_types.Tool], str]:
            tools: list[mcp_types.Tool] = []
            cursor: str | None = None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None or len(tools) > MAX_TOOLS:
                    break
            if cursor is not None or len(tools) > MAX_TOOLS:
                raise ToolUnavailableError(f"{self.target.name}: its list of tools does not end")
            info = client.server_info
            return tools, "" if info is None else f"{info.name} {info.version}".strip()

        try:
            return await self._use(read)
        except MCPError as error:
            raise self._outage(error) from error

    async def _use(self, work: Any) -> Any:
        """The result of ``work(client)``. Whatever goes wrong, except an answer with an error, ends the connection."""
        from mcp import MCPError
        from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND

        if self._lost is not None:
            raise ToolUnavailableError(
                f"{self.target.name}: {self._lost}; what it knew of the episode is lost"
            )
        ends_at = time.monotonic() + self.timeout_s
        connection = self._connection = self._connection or _Connection(self.target)
        connection.in_use += 1
        try:
            client = await asyncio.wait_for(asyncio.shield(connection.client), self.timeout_s)
            self._called = True
            return await asyncio.wait_for(work(client), max(0.0, ends_at - time.monotonic()))
        except MCPError as error:
            if error.code not in (INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND):
                self._give_up(connection, error)
            elif error.code != INVALID_PARAMS:
                self._lose(error)
            raise
        except ToolUnavailableError as error:
            self._give_up(connection, error)
            raise
        except asyncio.CancelledError:  # the caller's deadline has passed, so the server may hang
            self._give_up(connection, TimeoutError())
            raise
        except Exception as error:
            self._give_up(connection, error)
            raise self._outage(error) from error
        finally:
            connection.in_use -= 1
            if connection is not self._connection and not connection.in_use:
                closing = asyncio.create_task(connection.close())
                self._closing.add(closing)  # otherwise nothing refers to the task
                closing.add_done_callback(self._closing.discard)

    def _give_up(self, connection: _Connection, error: Exception) -> None:
        if self._connection is connection:
            self._connection = None
        self._lose(error)

    def _lose(self, error: Exception) -> None:
        if self.keeps_state and self._called:
            self._lost = f"a call failed ({_say(error)})"

    def _outage(self, error: Exception) -> ToolUnavailableError:
        if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
            return ToolUnavailableError(f"{self.target.name}: no reply within {self.timeout_s:g} s")
        return ToolUnavailableError(f"{self.target.name}: {_say(error)}")


def _say(error: BaseException) -> str:
    """An error in words. Of a group, whose own message says only how many there are, the first one."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARS]}".rstrip(": ")
