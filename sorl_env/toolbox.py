"""The toolbox: calls tools with retries under a deadline, one at a time, in batches, or on an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Union

from sorl_env.errors import did_you_mean
from sorl_env.tool import (
    Tool,
    ToolCall,
    ToolInputError,
    ToolLike,
    ToolReply,
    ToolRequest,
    ToolUnavailableError,
    as_tool,
)
from sorl_env.tool_schema import find_problem, takes_raw_text

logger = logging.getLogger(__name__)

ToolOutcome = Union[ToolCall, ToolUnavailableError]

_jitter = random.Random()  # its own generator: retries must not disturb anyone's seeds


class Toolbox:
    """The tools of an environment.

    ``call``, ``call_batch`` and ``acall`` return outcomes as values: a ``ToolCall``, or a ``ToolUnavailableError`` once
    retries or time have run out. A malformed request is a ``ToolCall`` with ``ok=False`` whose reply says what is wrong.
    A tool that raises anything else has a bug: it counts as unavailable at once, and its traceback is logged once.

    Args:
        timeout_s: seconds for one call in all, retries and waits included.
        retries: tries after the first one.
        backoff_s: wait before the first retry; it doubles from one to the next, with jitter.
        max_threads: calls of one batch that run at a time, for tools without ``call_batch``.

    Raises:
        ValueError: two tools share a name.
    """

    def __init__(
        self,
        tools: Sequence[ToolLike],
        timeout_s: float = 30.0,
        retries: int = 3,
        backoff_s: float = 0.25,
        max_threads: int = 32,
    ) -> None:
        self.tools: tuple[Tool, ...] = tuple(as_tool(tool) for tool in tools)
        self.names: tuple[str, ...] = tuple(tool.name for tool in self.tools)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two tools share a name: {', '.join(self.names)}")
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.max_threads = max_threads
        self._bound = {tool.name: _bind(tool) for tool in self.tools}
        self._logged_bugs: set[tuple[str, type[BaseException]]] = set()

    def call(self, request: ToolRequest) -> ToolOutcome:
        """Call one tool and wait for it, at most ``timeout_s``."""
        pending = self._prepare(request)
        if isinstance(pending, ToolCall):
            return pending
        bound = pending.bound
        while True:
            try:
                if bound.inline:
                    result = bound.run(pending.argument)
                else:
                    result = _start_thread(bound.run, pending.argument).result(pending.remaining_s())
                return pending.succeed(result)
            except Exception as error:  # whatever a tool raises becomes an outcome of its own call
                outcome = self._judge(pending, error)
            if outcome is not None:
                return outcome
            time.sleep(pending.wait_s)

    async def acall(self, request: ToolRequest) -> ToolOutcome:
        """Call one tool without blocking the event loop; a call that hangs is abandoned at the deadline."""
        pending = self._prepare(request)
        if isinstance(pending, ToolCall):
            return pending
        bound = pending.bound
        while True:
            try:
                if bound.inline:
                    result = bound.run(pending.argument)
                elif bound.arun is not None:
                    result = await _within(asyncio.ensure_future(bound.arun(pending.argument)), pending.remaining_s())
                else:
                    thread = asyncio.wrap_future(_start_thread(bound.run, pending.argument))
                    result = await _within(thread, pending.remaining_s())
                return pending.succeed(result)
            except Exception as error:  # as in ``call``
                outcome = self._judge(pending, error)
            if outcome is not None:
                return outcome
            await asyncio.sleep(pending.wait_s)

    def call_batch(self, requests: Sequence[ToolRequest]) -> list[ToolOutcome]:
        """Call tools for many requests, in order: one ``call_batch`` a tool that offers it, else concurrent calls."""
        outcomes: dict[int, ToolOutcome] = {}
        batches: dict[str, dict[int, _Pending]] = {}
        singles: dict[int, ToolRequest] = {}
        for index, request in enumerate(requests):
            bound = self._bound.get(request.tool)
            if bound is None or bound.run_batch is None:
                singles[index] = request
                continue
            pending = self._prepare(request)
            if isinstance(pending, ToolCall):
                outcomes[index] = pending
            else:
                batches.setdefault(request.tool, {})[index] = pending
        for batch in batches.values():
            outcomes.update(self._call_one_batch(batch))
        outcomes.update(zip(singles, self._call_concurrently(list(singles.values()))))
        return [outcomes[index] for index in range(len(requests))]

    def close(self) -> None:
        """Close the tools that hold something open."""
        for tool in self.tools:
            close = getattr(tool, "close", None)
            if close is not None:
                close()

    def _prepare(self, request: ToolRequest) -> _Pending | ToolCall:
        """The call about to be made, or the observation for a request that cannot be."""
        bound = self._bound.get(request.tool)
        if bound is None:
            problem = f"There is no tool {request.tool!r}. {did_you_mean(request.tool, self.names)}"
        elif bound.raw_text:
            return _Pending(request, bound, request.argument, self.timeout_s)
        else:
            argument, problem = _decode(request.argument, bound.tool.schema)
            if not problem:
                return _Pending(request, bound, argument, self.timeout_s)
        return ToolCall(request.tool, request.argument, problem, ok=False, error=problem, attempts=0)

    def _judge(self, pending: _Pending, error: Exception) -> ToolOutcome | None:
        """What a failed attempt means: the policy's fault, an outage for good, or None for another try."""
        if isinstance(error, ToolInputError):
            return pending.record(ToolReply(str(error)), error=str(error))
        if _is_outage(error):
            pending.wait_s = self.backoff_s * 2 ** (pending.attempts - 1) * _jitter.uniform(0.5, 1.0)
            if pending.attempts <= self.retries and pending.wait_s < pending.remaining_s():
                pending.attempts += 1
                return None
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if pending.remaining_s() <= 0:
                reason = f"no reply within {self.timeout_s:g} s ({reason})"
        else:
            reason = f"bug in the tool: {type(error).__name__}: {error}"
            self._log_bug(pending.request, error)
        message = f"tool {pending.request.tool} is unavailable after {pending.attempts} tries: {reason}"
        unavailable = ToolUnavailableError(message, pending.record(ToolReply(""), error=message))
        unavailable.__cause__ = error
        return unavailable

    def _log_bug(self, request: ToolRequest, error: Exception) -> None:
        key = (request.tool, type(error))
        if key not in self._logged_bugs:
            self._logged_bugs.add(key)
            logger.error("tool %s raised on %r (logged once)", request.tool, request.argument, exc_info=error)

    def _call_one_batch(self, pending: Mapping[int, _Pending]) -> dict[int, ToolOutcome]:
        """Rounds of one batched call; what failed in a slot is tried again with the others that did."""
        outcomes: dict[int, ToolOutcome] = {}
        while pending:
            results = self._run_batch(list(pending.values()))
            again: dict[int, _Pending] = {}
            for (index, call), result in zip(pending.items(), results):
                try:
                    if isinstance(result, Exception):
                        raise result
                    outcomes[index] = call.succeed(result)
                except Exception as error:  # as in ``call``
                    outcome = self._judge(call, error)
                    if outcome is None:
                        again[index] = call
                    else:
                        outcomes[index] = outcome
            if again:
                time.sleep(max(call.wait_s for call in again.values()))
            pending = again
        return outcomes

    def _run_batch(self, pending: Sequence[_Pending]) -> Sequence[Any]:
        """One result or exception a request; a batch that fails as a whole fails each of them."""
        bound = pending[0].bound
        assert bound.run_batch is not None
        arguments = [call.argument for call in pending]
        try:
            if bound.inline:
                results = bound.run_batch(arguments)
            else:
                results = _start_thread(bound.run_batch, arguments).result(pending[0].remaining_s())
            if len(results) != len(arguments):
                raise TypeError(f"call_batch returned {len(results)} results for {len(arguments)} requests")
        except Exception as error:  # as in ``call``
            return [error] * len(arguments)
        return results

    def _call_concurrently(self, requests: Sequence[ToolRequest]) -> list[ToolOutcome]:
        if len(requests) < 2 or all(r.tool in self._bound and self._bound[r.tool].inline for r in requests):
            return [self.call(request) for request in requests]
        with ThreadPoolExecutor(min(len(requests), self.max_threads)) as pool:
            return list(pool.map(self.call, requests))


@dataclass(frozen=True)
class _BoundTool:
    """A tool with its calling convention resolved: each ``run`` takes one decoded argument."""

    tool: Tool
    raw_text: bool
    inline: bool
    run: Callable[[Any], Any]
    arun: Callable[[Any], Any] | None
    run_batch: Callable[[list[Any]], Sequence[Any]] | None


def _bind(tool: Tool) -> _BoundTool:
    raw_text = takes_raw_text(tool.schema)
    acall = getattr(tool, "acall", None)
    return _BoundTool(
        tool=tool,
        raw_text=raw_text,
        inline=getattr(tool, "inline", False),
        run=tool.__call__ if raw_text else lambda arguments: tool(**arguments),
        arun=acall if raw_text or acall is None else lambda arguments: acall(**arguments),
        run_batch=getattr(tool, "call_batch", None),
    )


class _Pending:
    """A call under way: when it started, how often it was tried."""

    __slots__ = ("argument", "attempts", "bound", "request", "started", "timeout_s", "wait_s")

    def __init__(self, request: ToolRequest, bound: _BoundTool, argument: Any, timeout_s: float) -> None:
        self.request = request
        self.bound = bound
        self.argument = argument
        self.timeout_s = timeout_s
        self.started = time.perf_counter()
        self.attempts = 1
        self.wait_s = 0.0

    def remaining_s(self) -> float:
        return self.started + self.timeout_s - time.perf_counter()

    def succeed(self, result: Any) -> ToolCall:
        if isinstance(result, str):
            result = ToolReply(result)
        elif not isinstance(result, ToolReply):
            raise TypeError(f"tool {self.request.tool} returned {type(result).__name__}, expected str or ToolReply")
        return self.record(result)

    def record(self, reply: ToolReply, error: str | None = None) -> ToolCall:
        return ToolCall(
            tool=self.request.tool,
            argument=self.request.argument,
            reply=reply.text,
            ok=error is None,
            error=error,
            latency_s=time.perf_counter() - self.started,
            hits=reply.hits,
            attempts=self.attempts,
            cached=bool(reply.metadata.get("cached", False)),
        )


def _decode(body: str, schema: Mapping[str, Any]) -> tuple[Any, str]:
    """The arguments in a block's body, and what is wrong with them."""
    try:
        arguments = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return None, f"The request is not a JSON object: {error}. Parameters: {', '.join(schema['properties'])}."
    problem = find_problem(arguments, schema)
    return arguments, f"The request does not fit the tool: {problem}." if problem else ""


def _is_outage(error: Exception) -> bool:
    """Worth another try: a time-out, a lost connection, a server's 5xx, 408 or 429."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status >= 500 or status in (408, 429)
    # OSError covers sockets, urllib and requests; the time-out classes are one only from Python 3.11 on
    kinds: tuple[type[BaseException], ...] = (ToolUnavailableError, OSError, TimeoutError)
    kinds += (asyncio.TimeoutError, concurrent.futures.TimeoutError)
    httpx = sys.modules.get("httpx")  # its errors can only come from a tool that has imported it
    return isinstance(error, kinds if httpx is None else (*kinds, httpx.TransportError))


def _start_thread(function: Callable[[Any], Any], argument: Any) -> Future[Any]:
    """Run ``function`` in a daemon thread, which an interpreter about to exit does not wait for."""
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = function(argument)
        except BaseException as error:  # handed to the waiting side, which raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="sorl-tool", daemon=True).start()
    return future


async def _within(future: asyncio.Future[Any], timeout_s: float) -> Any:
    """Await with a deadline that holds even when the awaited side ignores its cancellation."""
    try:
        done, _ = await asyncio.wait({future}, timeout=max(timeout_s, 0.0))
    finally:
        if not future.done():
            future.cancel()
    if not done:
        raise TimeoutError
    return future.result()
