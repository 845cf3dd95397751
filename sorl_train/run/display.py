"""What the user sees of a run: one aligned line for each step and, on a terminal, progress bars below them.

The trainer does not know which of the two it is::

    display.start("so_ppo on minihop", steps=60)
    with display.stage("rollout", total=128) as advance:
        advance(1)
    display.step(1, metrics)
    display.close(summary)
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, NamedTuple, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from sorl_env.figures import duration

Advance = Callable[[int], None]


class Column(NamedTuple):
    """One figure of the display: the first of ``metrics`` that a step has."""

    title: str
    metrics: tuple[str, ...]
    form: str


COLUMNS = (
    Column("success", ("rollout/success",), "{:.3f}"),
    Column("valid", ("rollout/valid_turn_rate",), "{:.3f}"),
    Column("clip", ("loss/clip_frac",), "{:.4f}"),
    Column("bias", ("loss/clip_bias_norm",), "{:.3g}"),
    Column("grad", ("loss/grad_norm",), "{:.3g}"),
    Column("KL", ("loss/ref_kl", "loss/approx_kl"), "{:.2g}"),
    Column("tok/s", ("time/tokens_per_s",), "{:.0f}"),
)
SFT_COLUMNS = (
    Column("loss", ("sft/loss",), "{:.4f}"),
    Column("conf", ("sft/confident",), "{:.3f}"),
    Column("grad", ("sft/grad_norm",), "{:.3g}"),
)


class Display:
    """Prints a header, then one aligned line for each step."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._columns: tuple[Column, ...] = ()
        self._eta = Eta(0, 0, clock)

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """A loop of ``steps`` steps begins; a resumed run has done ``done`` of them already."""
        self._columns = ()
        self._eta = Eta(steps, done, self._clock)
        self.message(title)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """A part of a step (rollout, update, evaluation). Call the context's value with the units just done. Without a
        terminal nothing is printed: a log shows results, not progress."""
        yield lambda units: None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (counted from 1) is done."""
        seconds = self._eta.after(step)
        left = "-" if seconds is None else duration(seconds)
        width = 2 * len(str(self._eta.steps)) + 3
        columns = SFT_COLUMNS if "sft/loss" in metrics else COLUMNS
        figures = any(first_of(column, metrics) is not None for column in columns[:-1])
        if figures or "rollout/excluded_rate" in metrics:  # a step, even one that lost all its trajectories
            if columns != self._columns:
                self._columns = columns
                self.message(
                    f"{'step':>{width}}" + "".join(f"{c.title:>9}" for c in columns) + f"{'ETA':>12}"
                )
            values = "".join(f"{figure(column, metrics):>9}" for column in columns)
            self.message(f"{f'{step}/{self._eta.steps}':>{width}}{values}{left:>12}")
        if line := evaluation_line(step, metrics):
            self.message(line)

    def message(self, text: str) -> None:
        """Show a line of text that stays in view."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        """End the display, and print the summary if there is one."""
        if summary:
            self.message("\n" + summary_block(summary))


class LiveDisplay(Display):
    """The same lines, above progress bars of the steps and of the running stage."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self._console = console
        self._progress: Progress | None = None
        self._steps_task: TaskID | None = None

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self.close()
        super().start(title, steps, done)
        self._steps_task = self._bars().add_task("step", total=steps, completed=done)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """See ``Display``. Outside a loop (a cold start, the last evaluation) there is a bar for the stage alone."""
        bars = self._bars()
        task = bars.add_task(escape(name), total=total)
        try:
            yield lambda units: bars.advance(task, units)
        finally:
            if self._steps_task is None:
                self.close()  # with the finished bar still in view
            else:
                bars.remove_task(task)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        if self._steps_task is not None:
            self._bars().update(self._steps_task, completed=step)

    def message(self, text: str) -> None:
        """See ``Display``: printed above the bars."""
        self._console.print(escape(text), soft_wrap=True)

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._steps_task = None
        super().close(summary)

    def _bars(self) -> Progress:
        if self._progress is None:
            columns = (
                "{task.description:<10}",
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
        return self._progress


def make_display(stream: TextIO | None = None) -> Display:
    """Lines and progress bars on a terminal; lines alone into a pipe, a file, a CI log or a dumb terminal."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        return LiveDisplay(console)
    return Display(stream)


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
