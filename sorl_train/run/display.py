"""What the user sees of a run: a live panel on a terminal, elsewhere one aligned line for each step.

The trainer uses a ``Display`` and does not know which of the two it is::

    display.start("so_ppo on minihop", steps=60)
    with display.stage("rollout", total=128) as advance:
        advance(1)
    display.step(1, metrics)
    display.close(summary)
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from sorl_env.figures import duration

Advance = Callable[[int], None]


class Column(NamedTuple):
    """One figure of the display: the first of ``metrics`` that a step has."""

    title: str
    short: str
    metrics: tuple[str, ...]
    form: str


COLUMNS = (
    Column("success", "success", ("rollout/success",), "{:.3f}"),
    Column("valid turns", "valid", ("rollout/valid_turn_rate",), "{:.3f}"),
    Column("clip fraction", "clip", ("loss/clip_frac",), "{:.4f}"),
    Column("clipping-bias norm", "bias", ("loss/clip_bias_norm",), "{:.3g}"),
    Column("gradient norm", "grad", ("loss/grad_norm",), "{:.3g}"),
    Column("KL", "KL", ("loss/ref_kl", "loss/approx_kl"), "{:.2g}"),
    Column("tokens/s", "tok/s", ("time/tokens_per_s",), "{:.0f}"),
)
SFT_COLUMNS = (
    Column("loss", "loss", ("sft/loss",), "{:.4f}"),
    Column("confident tokens", "conf", ("sft/confident",), "{:.3f}"),
    Column("gradient norm", "grad", ("sft/grad_norm",), "{:.3g}"),
)
EVAL_COLUMN = Column("evaluation", "eval", ("eval/success",), "{:.3f}")


class Display(Protocol):
    """What the trainer tells the user."""

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """A loop of ``steps`` steps begins; a resumed run has done ``done`` of them already."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """A part of a step (rollout, update, evaluation). Call the context's value with the units just done."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (counted from 1) is done."""

    def message(self, text: str) -> None:
        """Show a line of text that stays in view."""

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        """End the display, and print the summary if there is one."""


def make_display(stream: TextIO | None = None) -> Display:
    """A live display on a terminal; plain lines into a pipe, a file, a CI log or a dumb terminal."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        return LiveDisplay(console)
    return PlainDisplay(stream)


class PlainDisplay(Display):
    """Prints a header, then one aligned line for each step."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._columns: tuple[Column, ...] = ()
        self._eta = Eta(0, 0, clock)

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self._columns = ()
        self._eta = Eta(steps, done, self._clock)
        self.message(title)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """See ``Display``. Nothing is printed: a log shows results, not progress."""
        yield lambda units: None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``Display``."""
        seconds = self._eta.after(step)
        left = "-" if seconds is None else duration(seconds)
        width = 2 * len(str(self._eta.steps)) + 3
        columns = SFT_COLUMNS if "sft/loss" in metrics else COLUMNS
        figures = any(first_of(column, metrics) is not None for column in columns[:-1])
        if figures or "rollout/excluded_rate" in metrics:  # a step, even one that lost all its trajectories
            if columns != self._columns:
                self._columns = columns
                self.message(
                    f"{'step':>{width}}" + "".join(f"{c.short:>9}" for c in columns) + f"{'ETA':>12}"
                )
            values = "".join(f"{figure(column, metrics):>9}" for column in columns)
            self.message(f"{f'{step}/{self._eta.steps}':>{width}}{values}{left:>12}")
        if line := evaluation_line(step, metrics):
            self.message(line)

    def message(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        if summary:
            self.message("\n" + summary_block(summary))


class LiveDisplay(Display):
    """A panel that is redrawn in place: steps and time left, the running stage, and each figure's recent values."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._eta = Eta(0, 0, clock)
        self._history: dict[Column, deque[float]] = {}
        self._progress = self._new_progress()
        self._steps_task: TaskID | None = None

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self._stop()
        self._eta, self._history = Eta(steps, done, self._clock), {}
        self._progress = self._new_progress()
        self._steps_task = self._progress.add_task("step", total=steps, completed=done, note="")
        self._console.print(f"[bold]{escape(title)}[/bold]")
        self._open()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """See ``Display``. Outside a loop (a cold start, the last evaluation) the panel opens for the stage alone."""
        alone = self._live is None
        if alone:
            self._progress, self._history = self._new_progress(), {}
        task = self._progress.add_task(escape(name), total=total, note="")
        if alone:
            self._open()
        try:
            yield lambda units: self._progress.advance(task, units)
        finally:
            if alone:
                self._stop()  # with the finished bar still in view
            self._progress.remove_task(task)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for column in (*COLUMNS, *SFT_COLUMNS, EVAL_COLUMN):
            value = first_of(column, metrics)
            if value is not None and math.isfinite(value):
                self._history.setdefault(column, deque(maxlen=40)).append(value)
        if line := evaluation_line(step, metrics):
            self.message(line)
        if self._steps_task is not None:
            left = self._eta.after(step)
            note = f"{duration(left)} left" if left is not None else ""
            self._progress.update(self._steps_task, completed=step, note=note)

    def message(self, text: str) -> None:
        """See ``Display``: printed above the panel."""
        self._console.print(escape(text))

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        self._stop()
        if summary:
            self._console.print("\n" + escape(summary_block(summary)))

    def _new_progress(self) -> Progress:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=32),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        return Progress(*columns, console=self._console)

    def _open(self) -> None:
        self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._panel)
        self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._steps_task = None

    def _panel(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for column, values in self._history.items():
            table.add_row(f"  {column.title}", column.form.format(values[-1]), sparkline(values))
        return Group(self._progress, table) if self._history else self._progress


class Eta:
    """Time left, from the mean duration of the recent steps."""

    def __init__(self, steps: int, done: int, clock: Callable[[], float]) -> None:
        self.steps = steps
        self._clock = clock
        self._ends: deque[tuple[int, float]] = deque([(done, clock())], maxlen=11)

    def after(self, step: int) -> float | None:
        """Seconds left once ``step`` is done."""
        self._ends.append((step, self._clock()))
        (first, begun), (last, now) = self._ends[0], self._ends[-1]
        return (now - begun) / (last - first) * (self.steps - last) if last > first else None


def first_of(column: Column, metrics: Mapping[str, float]) -> float | None:
    """The column's value among the metrics."""
    return next((metrics[name] for name in column.metrics if name in metrics), None)


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """An evaluation in words; empty if the step had none."""
    when = f"evaluation {f'after step {step}' if step else 'before training'}"
    if metrics.get("eval/excluded_rate") == 1.0:
        return f"{when}: no result: all trajectories were excluded (tool outages)"
    if "eval/success" not in metrics:
        return ""
    words = {
        "eval/success": "success",
        "eval/valid_turn_rate": "valid turns",
        "eval/search_off_success": "search off",
    }
    figures = ", ".join(f"{word} {metrics[name]:.3f}" for name, word in words.items() if name in metrics)
    return f"{when}: {figures}"


def figure(column: Column, metrics: Mapping[str, float]) -> str:
    """The column's value as text, ``-`` if a step has none."""
    value = first_of(column, metrics)
    return "-" if value is None else column.form.format(value)


def sparkline(values: deque[float]) -> str:
    """The recent values of a figure as one line of block characters; the lowest value is the lowest block.

    >>> sparkline(deque([0.0, 0.5, 1.0]))
    '▁▅█'
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) / span * 7)] for value in values)


def summary_block(summary: Mapping[str, object]) -> str:
    """Names and values in two columns, without those that are None; seconds and megabytes have their units."""
    lines = {_words(name): _value(name, value) for name, value in summary.items() if value is not None}
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _words(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_mb").replace("_", " ")


def _value(name: str, value: object) -> str:
    if isinstance(value, (int, float)) and name.endswith("_s"):
        return duration(value)
    if isinstance(value, (int, float)) and name.endswith("_mb"):
        return f"{value:,.0f} MB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)
