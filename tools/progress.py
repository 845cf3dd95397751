"""Show how far a long command is and when it will be done: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

EVERY_S = 10.0  # between two plain lines


class Progress:
    """Progress on standard error. ``rich`` draws a bar if it is installed and standard error is a terminal.

    Args:
        quiet: show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar = None if quiet else _rich_bar()
        self._task: Any = None
        self._stage, self._total, self._done = "", 0, 0
        self._began = self._shown = 0.0
        self._from = 0

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """Begin a stage of ``total`` items (0 if unknown), of which ``done`` were done in an earlier run."""
        self._finish()
        self._stage, self._total, self._done, self._from = stage, total, done, done
        self._began = self._shown = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(stage, total=total or None, completed=done)

    def advance(self, count: int) -> None:
        """Count ``count`` more items as done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif not self._quiet and time.monotonic() - self._shown >= EVERY_S:
            self._show()

    def close(self) -> None:
        """End the last stage."""
        self._finish()
        if self._bar is not None:
            self._bar.stop()

    def _finish(self) -> None:
        if self._stage and self._bar is None and not self._quiet:
            self._show()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._done, completed=self._done)
        self._stage = ""

    def _show(self) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._began
        rate = (self._done - self._from) / max(seconds, 1e-9)
        line = f"{self._stage}: {self._done:,}"
        if self._total:
            line += f" of {self._total:,} ({self._done / self._total:.0%})"
        line += f", {rate:,.0f}/s"
        if self._total > self._done and rate > 0:
            line += f", {duration((self._total - self._done) / rate)} to go"
        sys.stderr.write(f"{line}\n")


def duration(seconds: float) -> str:
    """A duration in words, such as ``45 s``, ``12 min``, ``3.5 h`` or ``12 days``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * 86400 else f"{seconds / 86400:.0f} days"


def _rich_bar() -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    columns = TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True))
    bar.start()
    return bar
