"""Which runs a report shows, which form a group (only their seeds differ), and their numbers at the end."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import MISSING, duration, read_json, size
from sorl_train.report.run import ReportRun
from sorl_train.run.folder import RunDir

RUNS = "runs"
RESULTS = "results.jsonl"
_OF_ONE_RUN = ("run_dir", "seed")
_LABEL_SETTINGS = 4  # with more settings that tell groups apart, a group goes by its run's label
_MOST_VALUES = 8  # a setting with more values is not offered for choosing groups
_RUN_ID = re.compile(r"-s\d+-[0-9a-f]+$")  # the end of a run folder's name in a study, after the arm
# an earlier start of such a run, which is not another seed
_MOVED_ASIDE = re.compile(r"-s\d+-[0-9a-f]{10}-\d+$")


@dataclass(frozen=True)
class RunFolder:
    """A run to show; in a study with the name of its cell, or of its arm if the cell is not known yet."""

    path: Path
    cell: str | None = None


@dataclass(frozen=True)
class Group:
    """Runs with the same settings but for the seed: their positions, and the values of the settings in which groups
    differ (None where one is not set)."""

    label: str
    settings: Mapping[str, Any]
    members: Sequence[int]


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """The given runs, and all runs of the given studies, which are in the study's folder ``runs/``. Raises
    ``UserError`` for a study without runs or with a damaged results file, and for a run that is given twice."""
    found: list[RunFolder] = []
    for path in paths:
        is_study = (path / RUNS).is_dir() and not RunDir(path).config.is_file()
        found += _runs_of_study(path) if is_study else [RunFolder(path)]
    resolved = [folder.path.resolve() for folder in found]
    twice = {str(path) for path in resolved if resolved.count(path) > 1}
    if twice:
        raise UserError(f"the same run is given twice: {', '.join(sorted(twice))}")
    return found


def _runs_of_study(path: Path) -> list[RunFolder]:
    folders = [config.parent for config in (path / RUNS).glob("*/config.yaml")]
    runs = sorted((run for run in folders if not _MOVED_ASIDE.search(run.name)), key=_natural)
    if not runs:
        raise UserError(f"the study {path} has no run yet: there is no {path / RUNS}/*/config.yaml")
    cells = _cells(path / RESULTS) if (path / RESULTS).is_file() else {}
    return [RunFolder(run, cells.get(run.name) or _RUN_ID.sub("", run.name)) for run in runs]


def _cells(results: Path) -> dict[str, str]:
    cells = {}
    for number, line in enumerate(results.read_bytes().splitlines(), start=1):
        try:
            result = read_json(line)
            cells[str(result["id"])] = str(result["cell"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{results}, line {number}: this is not a result of a study ({error}); sorl-lab stability .. --table "
                "writes the file anew"
            ) from error
    return cells


def _natural(path: Path) -> list[tuple[str, int]]:
    """A sort key that compares numbers in names as numbers: s2 before s10."""
    return [(text, int(part or 0)) for text, part in re.findall(r"(\D*)(\d*)", path.name)]


def group_runs(runs: Sequence[ReportRun]) -> list[Group]:
    """The groups of runs; those of a study are sorted by their settings, others stay in the given order."""
    members: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        shared = {name: value for name, value in run.config.items() if name not in _OF_ONE_RUN}
        key = json.dumps(shared, sort_keys=True, default=str) if shared else f"run {i}"
        members.setdefault(key, []).append(i)
    firsts = [runs[indices[0]] for indices in members.values()]
    names = dict.fromkeys(name for run in firsts for name in run.config if name not in _OF_ONE_RUN)
    columns = {name: [run.config.get(name) for run in firsts] for name in names}
    differing = {name: column for name, column in columns.items() if any(x != column[0] for x in column)}
    settings = [{name: column[i] for name, column in differing.items()} for i in range(len(firsts))]
    labels = _labels(runs, list(members.values()), settings)
    groups = [Group(*parts) for parts in zip(labels, settings, members.values(), strict=True)]
    in_study = any(run.cell for run in runs)
    return sorted(groups, key=lambda group: _order(group.settings)) if in_study else groups


def choices(groups: Sequence[Group]) -> Mapping[str, Sequence[Any]]:
    """Settings by which groups can be chosen, with their values: few values, each shared by several groups."""
    found = {}
    for name, column in _telling([group.settings for group in groups]).items():
        values = list(dict.fromkeys(column))
        if len(values) <= _MOST_VALUES and len(values) < len(groups):
            found[name] = values
    return found


def name_runs(runs: Sequence[ReportRun], groups: Sequence[Group]) -> list[str]:
    """A name for each run: its folder, or in a study, where folders are named by hashes, its group and seed."""
    names = [run.label for run in runs]
    for group in groups:
        for i in group.members if len(groups) > 1 else ():
            if runs[i].cell:
                alone = len(group.members) == 1
                names[i] = group.label if alone else f"{group.label}, seed {runs[i].config.get('seed')}"
    return names if len(set(names)) == len(names) else [run.label for run in runs]


def _telling(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Settings that differ, with their values as text. Of settings that split the groups alike, only the first."""
    found: dict[str, list[str]] = {}
    partitions = set()
    for name in settings[0]:
        column = [setting_text(each[name]) for each in settings]
        values = list(dict.fromkeys(column))
        partition = tuple(values.index(value) for value in column)
        if len(values) > 1 and partition not in partitions:
            partitions.add(partition)
            found[name] = column
    return found


def _labels(
    runs: Sequence[ReportRun], members: Sequence[Sequence[int]], settings: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Each group's cell in its study, or else the settings that tell the groups apart, or else its run's label."""
    if len(members) == 1:
        only = runs[members[0][0]]
        return [only.title if len(members[0]) > 1 else only.label]
    telling = _telling(settings) if len(_telling(settings)) <= _LABEL_SETTINGS else {}
    columns = [[text if name == "algo" else f"{name}={text}" for text in telling[name]] for name in telling]
    labels = []
    for g, indices in enumerate(members):
        cell = next((cell for i in indices if (cell := runs[i].cell)), None)
        labels.append(cell or ", ".join(column[g] for column in columns) or runs[indices[0]].label)
    return labels


def _order(settings: Mapping[str, Any]) -> list[tuple[bool, float, str]]:
    return [
        (False, float(value), "") if isinstance(value, (int, float)) else (True, 0.0, str(value))
        for value in settings.values()
    ]


def setting_text(value: Any) -> str:
    """A setting as text for labels and choices; different values have different texts."""
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return "none" if value is None else str(value)


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
        return size(2**20 * value)  # figures called _mb are in MiB
    if kind == "step":
        return f"step {value:.0f}"
    if kind == "short":
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:.3f}"
