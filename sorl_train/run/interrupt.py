"""What Ctrl-C and errors do to a run: what it has done is saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from sorl_env.errors import UserError
from sorl_env.interrupts import interrupt
from sorl_train.run.display import Display


@contextmanager
def finish_step_on_interrupt(display: Display) -> Iterator[threading.Event]:
    """In the block, the first Ctrl-C (or SIGTERM) sets the event, which asks the run to stop after its step. A second
    Ctrl-C raises ``KeyboardInterrupt`` at once."""
    interrupted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            interrupt()
            return
        interrupted.set()
        display.message("stopping after this step and its checkpoint; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield interrupted
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Diverged(UserError):
    """A figure of a step is not finite, so the weights that the run holds are not worth saving."""


@contextmanager
def saved_on_error(save: Callable[[], None], display: Display) -> Iterator[None]:
    """Call ``save`` when the block ends with an error, but not when a second Ctrl-C ends it at once.

    The block must leave the run between two steps: the last one is recorded, and nothing of the next one is updated. An
    error of ``save`` itself is told, and does not hide the first one.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, Diverged):
            try:
                save()
            except Exception as second:  # noqa: BLE001  such as a full disk, or a worker that is dead, too
                display.message(f"nothing could be saved: {type(second).__name__}: {str(second)[:200]}")
        raise
