"""The rows of the report's table of results: one per run, and one per group of runs that differ in the seed alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sorl_train.report.groups import Group
from sorl_train.report.page import figure
from sorl_train.report.run import ReportRun

# name, heading, kind of number
COLUMNS = (
    ("cold_start_success", "After cold start", "share"),
    ("best_success", "Peak success", "share"),
    ("final_success", "Final success", "share"),
    ("kept", "Final / peak", "share"),
    ("worst_drop", "Largest drop", "share"),
    ("collapse_step", "Collapsed at", "step"),
    ("max_grad_norm", "Max grad norm", "short"),
    ("normalized", "Normalized", "share"),
    ("wall_s", "Wall time", "seconds"),
)


@dataclass(frozen=True)
class Cell:
    """A figure: the value to sort by (None comes last), the text to show, and the range over a group's runs."""

    value: float | None
    text: str
    range: str = ""

    @property
    def sort(self) -> str:
        """The value as JavaScript reads it; empty for None."""
        if self.value is None:
            return ""
        return repr(float(self.value)).replace("inf", "Infinity")


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
        TableRow(f"r{i}", names[i], g, [_one(runs[i], *column) for column in COLUMNS], [i])
        for g, group in enumerate(groups)
        for i in group.members
    ]


def group_rows(runs: Sequence[ReportRun], groups: Sequence[Group]) -> list[TableRow]:
    """One row per group: the median and the range over its runs."""
    return [
        TableRow(
            f"g{g}",
            group.label,
            g,
            [_median([runs[i] for i in group.members], *column) for column in COLUMNS],
            group.members,
        )
        for g, group in enumerate(groups)
    ]


def _figures(run: ReportRun) -> Mapping[str, float]:
    return {**run.headline, **run.stability}


def _one(run: ReportRun, name: str, title: str, kind: str) -> Cell:
    value = _figures(run).get(name)
    if name == "collapse_step" and value is None and run.stability:
        return Cell(None, "none")
    return Cell(value, figure(value, kind))


def _median(runs: Sequence[ReportRun], name: str, title: str, kind: str) -> Cell:
    values = [value for run in runs if (value := _figures(run).get(name)) is not None]
    if name == "collapse_step":
        return _collapses(values, [run for run in runs if run.stability])
    if not values:
        return Cell(None, figure(None))
    low, high = figure(min(values), kind), figure(max(values), kind)
    middle = statistics.median(values)
    shown = "" if low == high else f"{low} to {high}"
    return Cell(middle, figure(middle, kind), shown)


def _collapses(steps: Sequence[float], runs: Sequence[ReportRun]) -> Cell:
    """How many of a group's runs collapsed, and the median step; sorted by the share that collapsed."""
    if not runs:
        return Cell(None, figure(None))
    middle = f"median step {statistics.median(steps):g}" if steps else ""
    return Cell(len(steps) / len(runs), f"{len(steps)} of {len(runs)}", middle)
