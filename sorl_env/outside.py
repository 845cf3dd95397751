"""Call code from outside: tools, tasks, and what an algorithm computes; and check what a task's functions give.

Such code may do anything. Whatever it raises becomes an ``Exception`` here, so that ``sys.exit`` in a reward is a bug
of that reward: it neither ends the process with status 0 nor stops an event loop. Only Ctrl-C in the main thread
passes.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from sorl_env.errors import UserError
from sorl_env.text import quoted, valid_text

# Twice as many calls as a rollout has at once by default. So a server that hangs for a while, with all of them waiting,
# ends no run; a tool that never returns does so before its threads fill the memory.
MAX_GIVEN_UP = 256
_T = TypeVar("_T")


class OutsideError(RuntimeError):
    """Code from outside raised a ``BaseException`` such as ``SystemExit``, which is the ``__cause__``."""


class HungError(UserError):
    """Too many calls of one tool never returned; the run has to end."""


def call_outside(function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
    """Call ``function``. An error that is not an ``Exception`` becomes an ``OutsideError``."""
    try:
        return function(*arguments, **named)
    except Exception:
        raise
    except BaseException as error:
        raise _exception(error).with_traceback(error.__traceback__) from error


def _exception(error: BaseException) -> OutsideError:
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error  # the user's Ctrl-C
    return OutsideError(f"it raised {type(error).__name__}({error}), which may not end this process")


async def await_outside(function: Callable[..., Awaitable[_T]], argument: Any, timeout_s: float) -> _T:
    """Await what ``function`` returns, for at most ``timeout_s`` seconds, even if it ignores that it is cancelled.

    Raises:
        TimeoutError: the time is over.
        OutsideError: it raised an error that is not an ``Exception``, or cancelled itself.
    """

    async def call() -> _T:
        try:
            return await function(argument)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise _exception(error).with_traceback(error.__traceback__) from error

    return await within(asyncio.ensure_future(call()), timeout_s)


async def within(future: asyncio.Future[_T], timeout_s: float) -> _T:
    """Await a future that code from outside fulfils, ``timeout_s`` seconds at most. Raises as ``await_outside``."""
    try:
        done, _ = await asyncio.wait({future}, timeout=max(timeout_s, 0.0))
    finally:
        if not future.done():
            future.cancel()
    if not done:
        raise TimeoutError
    try:
        return future.result()
    except asyncio.CancelledError as error:  # not the caller's own, which ends the wait above
        raise OutsideError("it cancelled its own call") from error


def start_thread(function: Callable[[Any], _T], argument: Any) -> Future[_T]:
    """Call ``function`` in a daemon thread, for which Python does not wait when it ends."""
    future: Future[_T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call_outside(function, argument)
        except StopIteration as error:  # a future of asyncio refuses this one, and would never be done
            future.set_exception(RuntimeError(f"it raised StopIteration({error})"))
        except BaseException as error:  # noqa: BLE001  passed to the waiting side, which raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="sorl-tool", daemon=True).start()
    return future


class Threads:
    """Calls of one tool in threads, each of which is given up at its deadline.

    Nothing can end a thread from outside, so one whose call never returns stays. They are counted; a call that returns
    late is counted no longer.
    """

    def __init__(self) -> None:
        self._given_up: set[Future[Any]] = set()

    def call(self, function: Callable[[Any], _T], argument: Any, timeout_s: float) -> _T:
        """Wait for the call. Raises ``concurrent.futures.TimeoutError`` after ``timeout_s`` seconds."""
        future = start_thread(function, argument)
        try:
            return future.result(timeout_s)
        finally:
            self._leave(future)

    async def acall(self, function: Callable[[Any], _T], argument: Any, timeout_s: float) -> _T:
        """``call`` on an event loop, for at most ``timeout_s`` seconds. Raises as ``await_outside`` does."""
        future = start_thread(function, argument)
        try:
            return await within(asyncio.wrap_future(future), timeout_s)
        finally:
            self._leave(future)

    def _leave(self, future: Future[Any]) -> None:
        if not future.done():
            self._given_up.add(future)
            future.add_done_callback(self._given_up.discard)

    def check(self, what: str, timeout_s: float) -> None:
        """Raise ``HungError`` if ``MAX_GIVEN_UP`` calls were given up and have not returned since.

        ``timeout_s`` is what each was given, in seconds."""
        if (count := len(self._given_up)) >= MAX_GIVEN_UP:
            raise HungError(
                f"{what}: {count} calls have not returned, although each was given up after {timeout_s:g} s, and every "
                "one of them holds a thread. Give it a time-out of its own for what it waits for (a connection, a "
                "process), so that a call always ends, and start again (a run: with --resume)"
            )


def place_of(function: Any) -> str:
    """Where a function stands, as `` (file:line)``; empty where that is unknown."""
    inner = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial
    code = getattr(inner, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def ask_for_prompt(task: str, prompt: Callable[..., Any], *arguments: Any) -> str:
    """The text of a prompt. Raises ``UserError`` if the function returns something else."""
    text = call_outside(prompt, *arguments)
    if not isinstance(text, str):
        raise UserError(f"task {task}: its prompt{place_of(prompt)} returned {_said(text)}; return a text")
    return valid_text(text)


def ask_for_items(task: str, reward: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """The items of a reward. Raises ``UserError`` unless they map names to finite numbers: a NaN would make the loss of
    a whole batch NaN."""
    items: Any = call_outside(reward, *arguments)
    # the plain types come first: asking an abstract class takes several times as long, and each episode ends here
    wrong = None if isinstance(items, (dict, Mapping)) else _said(items)
    for name, value in () if wrong else items.items():
        if not isinstance(name, str) or not isinstance(value, (float, int, numbers.Real)):
            wrong = f"{_said(name)}: {_said(value)} among its items"
        elif not math.isfinite(value):
            where = f"task {task}: its reward{place_of(reward)}"
            raise UserError(f"{where} gave item {name!r} as {value}; it must be finite")
    if wrong:
        where = f"task {task}: its reward{place_of(reward)}"
        raise UserError(f"{where} returned {wrong}; return {{name: number}}, as {{'exact_match': 1.0}}")
    # a number of NumPy cannot be written as JSON
    return {name: value if type(value) in (float, int) else float(value) for name, value in items.items()}


def _said(value: Any) -> str:
    return "None" if value is None else f"{quoted(repr(value))[1:-1]} ({type(value).__name__})"
