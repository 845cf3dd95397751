"""The numbers of a run at its end: on the cards of a page of one run, and in the table of a page of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sorl_env.figures import MISSING, duration, size
from sorl_train.report.groups import Group
from sorl_train.report.run import ReportRun


@dataclass(frozen=True)
class Result:
    """One of the numbers in `ReportRun.results`, its label, and the kind of number that it is."""

    name: str
    label: str
    kind: str


HEADLINE = (
    Result("cold_start_success", "After cold start", "share"),
    Result("best_success", "Peak success", "share"),
    Result("final_success", "Final success", "share"),
    Result("search_off_success", "Without search", "share"),
    Result("wall_s", "Wall time", "seconds"),
    Result("peak_rss_mb", "Peak memory", "megabytes"),
)
STABILITY = (
    Result("kept", "Final / peak", "share"),
    Result("worst_drop", "Largest drop", "share"),
    Result("collapse_step", "Collapsed at", "step"),
    Result("max_grad_norm", "Max gradient norm", "short"),
    Result("normalized", "Normalized", "share"),
    Result("clip_frac", "Tokens clipped", "short"),
)
_OF_A_PAGE_OF_ONE = ("search_off_success", "peak_rss_mb", "clip_frac")
COLUMNS = tuple(result for result in (*HEADLINE, *STABILITY) if result.name not in _OF_A_PAGE_OF_ONE)


@dataclass(frozen=True)
class Cell:
    """The value to sort by (None comes last), the text to show, and the range over a group's runs."""

    value: float | None
    text: str
    range: str = ""

    @property
    def sort(self) -> str:
        """The value as JavaScript reads it; empty for None."""
        return "" if self.value is None else repr(float(self.value)).replace("inf", "Infinity")


@dataclass(frozen=True)
class TableRow:
    """One row. ``key`` identifies its curves in the page: ``g`` (group) or ``r`` (run) with a number."""

    key: str
    label: str
    group: int
    cells: Sequence[Cell]
    members: Sequence[int]


def run_rows(runs: Sequence[ReportRun], groups: Sequence[Group], names: Sequence[str]) -> list[TableRow]:
    """One row per run, group after group."""
    return [
        TableRow(f"r{i}", names[i], g, [run_cell(runs[i], column) for column in COLUMNS], [i])
        for g, group in enumerate(groups)
        for i in group.members
    ]


def group_rows(runs: Sequence[ReportRun], groups: Sequence[Group]) -> list[TableRow]:
    """One row per group: the median and the range over its runs."""
    members = [[runs[i] for i in group.members] for group in groups]
    return [
        TableRow(f"g{g}", group.label, g, [_median(members[g], column) for column in COLUMNS], group.members)
        for g, group in enumerate(groups)
    ]


def run_cell(run: ReportRun, result: Result) -> Cell:
    """One of a run's numbers."""
    value = run.results.get(result.name)
    if result.name == "collapse_step" and value is None and run.is_measured:
        return Cell(None, "none")
    return Cell(value, format_result(value, result.kind))


def _median(runs: Sequence[ReportRun], result: Result) -> Cell:
    values = [run.results[result.name] for run in runs if result.name in run.results]
    if result.name == "collapse_step":
        return _collapses(values, sum(run.is_measured for run in runs))
    if not values:
        return Cell(None, MISSING)
    low, high = format_result(min(values), result.kind), format_result(max(values), result.kind)
    middle = statistics.median(values)
    return Cell(middle, format_result(middle, result.kind), "" if low == high else f"{low} to {high}")


def _collapses(steps: Sequence[float], runs: int) -> Cell:
    """How many of a group's measured runs collapsed, and the median step; sorted by the share that collapsed."""
    if not runs:
        return Cell(None, MISSING)
    middle = f"median step {statistics.median(steps):g}" if steps else ""
    return Cell(len(steps) / runs, f"{len(steps)} of {runs}", middle)


def format_result(value: float | None, kind: str) -> str:
    """A number of a certain kind as a person reads it; an en dash where there is none."""
    if value is None:
        return MISSING
    if kind == "seconds":
        return duration(value)
    if kind == "megabytes":
        return size(1e6 * value)
    if kind == "step":
        return f"step {value:.0f}"
    if kind == "short":
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:.3f}"
