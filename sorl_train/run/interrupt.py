"""What Ctrl-C does to a run: the step in progress is finished and saved first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
