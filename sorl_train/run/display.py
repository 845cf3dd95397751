"""What the user sees of a run, and what Ctrl-C and errors do to it: what it has done is saved first.

There is one aligned line for each step and, on a terminal, progress bars below them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from sorl_env.commands.command import drop_output, interrupt, say
from sorl_env.errors import UserError
from sorl_env.text import duration, size

Advance = Callable[[int], None]
QUIET_S = 10.0  # seconds without a line after which one tells of the progress, where there are no bars


# title of a column -> its form, and the figure that it shows: the first of these that a step has
Columns = dict[str, tuple[str, tuple[str, ...]]]

COLUMNS: Columns = {
    "sampled": ("{:.3f}", ("rollout/success",)),
    "valid": ("{:.3f}", ("rollout/valid_turn_rate",)),
    "clip": ("{:.4f}", ("loss/clip_frac",)),
    "bias": ("{:.3g}", ("loss/clip_bias_norm",)),
    "factor": ("{:.3f}", ("loss/normalizer",)),
    "scale": ("{:.2g}", ("loss/trust_scale",)),
    "grad": ("{:.3g}", ("loss/grad_norm",)),
    "KL old": ("{:.2g}", ("loss/approx_kl",)),
    "KL ref": ("{:.2g}", ("loss/ref_kl",)),
    "tok/s": ("{:.0f}", ("time/tokens_per_s",)),
}
OPTIONAL = ("scale", "KL ref")  # columns of steps with a trust region, and with a reference policy
LEGEND = (
    "sampled: success of the sampled training trajectories (evaluations are greedy, on held-out questions); factor: of "
    "normalization; scale: of the learning rate, by the trust region; KL: to the old or to the reference policy"
)
SFT_COLUMNS: Columns = {
    "loss": ("{:.4f}", ("sft/loss",)),
    "conf": ("{:.3f}", ("sft/confident",)),
    "grad": ("{:.3g}", ("sft/grad_norm",)),
}


class Display:
    """Prints a header, then one aligned line for each step."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._spoke = clock()  # when the last line was printed
        self._columns: Columns = {}
        self._steps = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=11)  # of the newest steps: number and time

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """A loop of ``steps`` steps begins; a resumed run has done ``done`` of them already."""
        self._columns, self._steps = {}, steps
        self._ends.clear()
        self._ends.append((done, self._clock()))
        self.message(title)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """A part of a step (rollout, update, evaluation). Call the context's value with the units just done. Without a
        terminal a line says every ``QUIET_S`` seconds which part runs, and how far it has come."""
        done = 0

        def advance(units: int) -> None:
            nonlocal done
            done += units
            if self._clock() - self._spoke >= QUIET_S:
                self.message(f"{name}: {done:,} of {total:,}")

        yield advance

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (counted from 1) is done."""
        self._ends.append((step, self._clock()))
        columns = SFT_COLUMNS if "sft/loss" in metrics else COLUMNS
        # what the algorithm of this run never has gets no column
        columns = {
            title: column
            for title, column in columns.items()
            if title not in OPTIONAL or column[1][0] in metrics or title in self._columns
        }
        # a step, even one that lost all its trajectories, and not an evaluation alone
        if "rollout/excluded_rate" in metrics or any(
            name in metrics for _, names in columns.values() for name in names if not name.startswith("time/")
        ):
            width = 2 * len(str(self._steps)) + 3
            if columns != self._columns:
                if not self._columns and columns.keys() <= COLUMNS.keys():
                    self.message(LEGEND)
                self._columns = columns
                self.message("".join([f"{'step':>{width}}", *(f"{c:>9}" for c in columns), f"{'ETA':>12}"]))
            figures = "".join(f"{_figure(metrics, *column):>9}" for column in columns.values())
            excluded = metrics.get("rollout/excluded_rate", 0.0)
            mark = f"  {excluded:.1%} excluded" if excluded else ""
            self.message(f"{f'{step}/{self._steps}':>{width}}{figures}{self._time_left():>12}{mark}")
        if line := evaluation_line(step, metrics):
            self.message(line)

    def _time_left(self) -> str:
        (first, begun), (last, now) = self._ends[0], self._ends[-1]
        return duration((now - begun) / (last - first) * (self._steps - last)) if last > first else "-"

    def message(self, text: str) -> None:
        """Show a line of text that stays in view. If nobody reads the output any more, the run goes on without it."""
        self._spoke = self._clock()
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except BrokenPipeError:  # its reader has left, as `head` does, and may have read the errors, too
            drop_output()
            with suppress(BrokenPipeError):
                say("sorl-train", "nobody reads the output any more; the run goes on, and Ctrl-C ends it")

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        """End the display, and print the summary if there is one."""
        if summary:
            rest = {name: value for name, value in summary.items() if name != "off_policy"}
            self.message("\n" + summary_block(rest))
            if words := summary.get("off_policy"):
                self.message(f"\n{words}")


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
            columns = (BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress("{task.description:<10}", *columns, console=self._console)
            self._progress.start()
        return self._progress


def make_display(stream: TextIO | None = None) -> Display:
    """Lines and progress bars on a terminal; lines alone into a pipe, a file, a CI log or a dumb terminal."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        return LiveDisplay(console)
    return Display(stream)


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """An evaluation in words; empty if the step had none."""
    when = f"evaluation {f'after step {step}' if step else 'before training'}"
    if metrics.get("eval/excluded_rate") == 1.0:
        return f"{when}: no result: all trajectories were excluded (tool outages)"
    if "eval/success" not in metrics:
        return ""
    words = {
        "eval/success": "greedy success",
        "eval/valid_turn_rate": "valid turns",
        "eval/search_off_success": "search off",
    }
    figures = ", ".join(f"{word} {metrics[name]:.3f}" for name, word in words.items() if name in metrics)
    return f"{when}: {figures}"


def _figure(metrics: Mapping[str, float], form: str, names: Sequence[str]) -> str:
    return next((form.format(metrics[name]) for name in names if name in metrics), "-")


TITLES = {"cold_start_success": "success before training"}  # there need not have been a cold start


def summary_block(summary: Mapping[str, object]) -> str:
    """Names and values in two columns, without those that are None; seconds and megabytes have their units."""
    lines = {}
    for name, value in summary.items():
        title = TITLES.get(name, name.removesuffix("_s").removesuffix("_mb").replace("_", " "))
        if isinstance(value, (int, float)) and name.endswith("_s"):
            lines[title] = duration(value)
        elif isinstance(value, (int, float)) and name.endswith("_mb"):
            lines[title] = size(2**20 * value)  # in MiB
        elif isinstance(value, float):
            lines[title] = f"{value:.4g}"
        elif value is not None:
            lines[title] = f"{value:,}" if type(value) is int else str(value)
    width = max(map(len, lines))
    return "\n".join(f"{title:<{width}}  {value}" for title, value in lines.items())


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
