"""The toolbox calls tools with retries and a deadline: in the calling thread, or on an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import inspect
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_env.outside import Threads, await_outside, call_outside
from sorl_env.text import quoted, valid_text
from sorl_env.tool.schema import read_arguments, takes_raw_text
from sorl_env.tool.tool import (
    MAX_REPLY_CHARS,
    Tool,
    ToolCall,
    ToolInputError,
    ToolLike,
    ToolOutcome,
    ToolReply,
    ToolRequest,
    ToolUnavailableError,
    as_tool,
    begin_episode,
    keeps_state,
)

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 1000  # of an error message about a tool: an exception can hold a whole reply
_CALLERS = (str(Path(__file__).parents[1]), str(Path(concurrent.futures.__file__).parent))
_jitter = random.Random()  # its own generator, so that retries do not change the draws of others


def _outside_traceback(error: Exception) -> TracebackType | None:
    """The traceback from the tool's own code on; None where that returned something that cannot be used."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_CALLERS):
        trace = trace.tb_next
    return trace


class Toolbox:
    """The tools of an environment.

    ``call`` and ``acall`` return a ``ToolCall``, or a ``ToolUnavailableError`` once the retries or the
    time are used up. A malformed request gives a ``ToolCall`` with ``ok=False`` and a reply that says why. A tool that
    raises anything else has a bug: it counts as unavailable at once, and its traceback is logged once. Where too many
    calls of a tool never return, a call raises ``HungError`` (see ``sorl_env.outside``).

    Args:
        timeout_s: seconds for one call in all, with retries and the waits before them.
        retries: further tries after the first one fails.
        backoff_s: wait before the first retry; it doubles with each retry, and has jitter.
        max_reply_chars: a longer reply is cut at once, and its record says so.

    Raises:
        ValueError: two tools share a name.
    """

    def __init__(
        self,
        tools: Sequence[ToolLike],
        timeout_s: float = 30.0,
        retries: int = 3,
        backoff_s: float = 0.25,
        max_reply_chars: int = MAX_REPLY_CHARS,
    ) -> None:
        self.tools: tuple[Tool, ...] = tuple(as_tool(tool) for tool in tools)
        self.names: tuple[str, ...] = tuple(tool.name for tool in self.tools)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two tools share a name: {', '.join(self.names)}")
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.max_reply_chars = max_reply_chars
        self.stateful: frozenset[str] = frozenset(tool.name for tool in self.tools if keeps_state(tool))
        self._bound = {tool.name: _bind(tool, Threads()) for tool in self.tools}
        self._logged_bugs: set[tuple[str, type[BaseException]]] = set()

    def for_episode(self, example: Any, seed: int) -> Toolbox:
        """A toolbox for one episode: stateful tools are the episode's own, the others are the same objects.

        Raises:
            UserError: a tool's ``new_episode`` did not return a tool of that name.
            ToolUnavailableError: it raised another error.
        """
        box = copy.copy(self)
        groups: dict[int, Mapping[str, Tool]] = {}
        own: dict[str, Tool] = {}
        try:
            for tool in self.tools:
                if keeps_state(tool):
                    own[tool.name] = call_outside(begin_episode, tool, example, seed, groups)
        except Exception as error:
            box.tools = tuple(own.values())
            box.close()
            if isinstance(error, (UserError, ToolUnavailableError)):
                raise
            logger.exception("tool %s: new_episode raised", tool.name)
            said = valid_text(f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS])
            raise ToolUnavailableError(f"tool {tool.name} cannot begin an episode: {said}") from error
        box.tools = tuple(own.get(tool.name, tool) for tool in self.tools)
        box._bound = self._bound | {name: _bind(own[name], self._bound[name].threads) for name in own}
        return box

    def call(self, request: ToolRequest) -> ToolOutcome:
        """Call one tool and wait for its outcome, at most ``timeout_s``."""
        try:
            self._call(request, blocking=True).send(None)
        except StopIteration as ended:
            outcome: ToolOutcome = ended.value
            return outcome
        raise AssertionError("a blocking call awaits nothing")

    async def acall(self, request: ToolRequest) -> ToolOutcome:
        """Call one tool without blocking the event loop. A call that hangs is abandoned at the deadline."""
        return await self._call(request, blocking=False)

    async def _call(self, request: ToolRequest, *, blocking: bool) -> ToolOutcome:
        """One call; with ``blocking`` it waits in the calling thread and awaits nothing."""
        prepared = self._prepare(request)
        if isinstance(prepared, ToolCall):
            return prepared
        bound, argument = prepared
        started = time.perf_counter()
        attempts = 0
        while True:
            attempts += 1
            remaining_s = started + self.timeout_s - time.perf_counter()
            result: Any
            try:
                if bound.inline:
                    result = bound.run(argument)
                elif blocking:
                    result = bound.threads.call(bound.run, argument, remaining_s)
                elif bound.arun is not None:
                    result = await await_outside(bound.arun, argument, remaining_s)
                else:
                    result = await bound.threads.acall(bound.run, argument, remaining_s)
            except Exception as error:  # noqa: BLE001  any error of a tool becomes the outcome of its own call
                result = error
            verdict = self._settle(request, result, time.perf_counter() - started, attempts)
            if not isinstance(verdict, float):
                return verdict
            if blocking:
                time.sleep(verdict)
            else:
                await asyncio.sleep(verdict)

    def close(self, only: frozenset[str] | None = None) -> None:
        """Close the tools; with ``only``, just those with these names."""
        for tool in self.tools:
            close = getattr(tool, "close", None)
            if close is not None and (only is None or tool.name in only):
                close()

    def _prepare(self, request: ToolRequest) -> tuple[_BoundTool, Any] | ToolCall:
        """Look up the tool and decode its argument; a request that cannot be served gives the record of its call."""
        bound = self._bound.get(request.tool)
        if bound is not None and bound.raw_text:
            return bound, request.argument
        if bound is None:
            problem = f"There is no tool {quoted(request.tool)}. {did_you_mean(request.tool, self.names)}"
        else:
            arguments, problem = read_arguments(request.argument, bound.tool.schema, bound.signature)
            if not problem:
                return bound, arguments
        return ToolCall(request.tool, request.argument, problem, ok=False, error=problem, attempts=0)

    def _settle(
        self, request: ToolRequest, result: Any, latency_s: float, attempts: int
    ) -> ToolOutcome | float:
        """Turn one attempt's result or exception into an outcome, or into the seconds to wait before the next try."""
        refused = isinstance(result, ToolInputError)
        if refused or not isinstance(result, Exception):
            try:
                reply = ToolReply.received(str(result) if refused else result, self.max_reply_chars)
                why = reply.text if refused else None
                facts = (latency_s, reply.hits, attempts, reply.cached, reply.cut_from)
                return ToolCall(request.tool, request.argument, reply.text, not refused, why, *facts)
            except TypeError as error:
                result = error
        if _is_outage(result):
            wait_s = self.backoff_s * 2 ** (attempts - 1) * _jitter.uniform(0.5, 1.0)
            if attempts <= self.retries and latency_s + wait_s < self.timeout_s:
                return wait_s
            reason = _say(result)
            if latency_s >= self.timeout_s:
                bound = self._bound[request.tool]
                bound.threads.check(f"tool {request.tool}", self.timeout_s)
                url = getattr(bound.tool, "url", "") or ""
                reason = f"no reply{url and f' from {url}'} within {self.timeout_s:g} s ({reason})"
        else:
            reason = f"bug in the tool: {_say(result)}"
            self._log_bug(request, result)
        tries = "1 try" if attempts == 1 else f"{attempts} tries"
        message = f"tool {request.tool} is unavailable after {tries}: {reason}"
        call = ToolCall(*request, "", ok=False, error=message, latency_s=latency_s, attempts=attempts)
        unavailable = ToolUnavailableError(message, call)
        unavailable.__cause__ = result
        return unavailable

    def _log_bug(self, request: ToolRequest, error: Exception) -> None:
        key = (request.tool, type(error))
        if key not in self._logged_bugs:
            self._logged_bugs.add(key)
            argument = quoted(request.argument, _MAX_REASON_CHARS)
            shown = (type(error), error, _outside_traceback(error))
            logger.error("tool %s failed on %s (logged once)", request.tool, argument, exc_info=shown)


@dataclass(frozen=True)
class _BoundTool:
    """A tool and how to call it: each ``run`` takes one decoded argument."""

    tool: Tool
    signature: inspect.Signature
    raw_text: bool
    inline: bool
    run: Callable[[Any], Any]
    arun: Callable[[Any], Any] | None
    threads: Threads


def _bind(tool: Tool, threads: Threads) -> _BoundTool:
    raw_text = takes_raw_text(tool.schema)
    acall = getattr(tool, "acall", None)
    return _BoundTool(
        tool=tool,
        signature=inspect.signature(tool),
        raw_text=raw_text,
        inline=getattr(tool, "inline", False),
        run=functools.partial(call_outside, tool.__call__ if raw_text else lambda given: tool(**given)),
        arun=acall if raw_text or acall is None else lambda arguments: acall(**arguments),
        threads=threads,
    )


def _say(error: Exception) -> str:
    return valid_text(f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARS]}".rstrip(": "))


def _is_outage(error: Exception) -> bool:
    """Whether another try may help: after a time-out, a lost connection, or an HTTP 5xx, 408 or 429."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in (408, 429)
    # OSError covers sockets, urllib and requests; before Python 3.11 there are three classes of time-outs
    kinds: tuple[type[BaseException], ...] = (ToolUnavailableError, OSError, TimeoutError)
    kinds += (asyncio.TimeoutError, concurrent.futures.TimeoutError)
    httpx = sys.modules.get("httpx")  # errors of httpx can only come from a tool that has imported it
    return isinstance(error, kinds if httpx is None else (*kinds, httpx.TransportError))
