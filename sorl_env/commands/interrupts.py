"""Ctrl-C and SIGTERM while an event loop runs.

A signal handler that raises inside asyncio's own code can lose a callback that the loop had just taken from its queue.
The task that waited for it then never ends, not even when it is cancelled, and the process hangs. So a handler calls
``interrupt``, which cancels the coroutine that ``run_async`` runs; ``asyncio.run`` does the same for Ctrl-C alone, from
Python 3.11 on.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Running:
    """What the main thread's event loop runs now."""

    task: asyncio.Task[Any] | None = None
    interrupted = False


def interrupt(number: int = 0, frame: Any = None) -> None:
    """Raise ``KeyboardInterrupt`` in the main thread: at once, or from ``run_async`` if that is running.

    It has the arguments of a signal handler, and is only to be called by one. The next ones raise at once, in case
    something ignores that it is cancelled.
    """
    task = _Running.task
    if task is None or _Running.interrupted:
        raise KeyboardInterrupt
    _Running.interrupted = True
    task.get_loop().call_soon_threadsafe(task.cancel)


def interrupt_on(*signals: signal.Signals) -> None:
    """Make these signals end the process as Ctrl-C does, so that it can save its work first."""
    for each in signals:
        signal.signal(each, interrupt)


def run_async(main: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run``, which an interrupt always ends.

    Raises:
        KeyboardInterrupt: after an ``interrupt``, once the coroutine has dealt with its cancellation.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        return asyncio.run(main)
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return asyncio.run(_watched(main))
    finally:
        interrupted, _Running.interrupted = _Running.interrupted, False
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt


async def _watched(main: Coroutine[Any, Any, _T]) -> _T:
    _Running.task = asyncio.current_task()
    try:
        return await main
    finally:
        _Running.task = None
