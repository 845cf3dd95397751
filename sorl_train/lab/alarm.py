"""``sorl-lab alarm``: replays the collapse alarm on finished runs, with its default limits or another early one.

The default limits were chosen on runs of one size. On runs of your own, some stable and some collapsed, this shows how
early the alarm would have come, and how often it would have been false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sorl_env.errors import UserError
from sorl_env.text import format_number, markdown_table, read_json
from sorl_train.config.files import read_resolved
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.report.groups import find_runs
from sorl_train.run.alarm import Alarm, CollapseAlarm
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import COLLAPSED

# in a file of recorded runs, where null stands for a metric that the step does not have
NOT_FINITE = "not finite"
AHEAD = 5  # an alarm this many steps before the collapse leaves time to react
SUCCESS = "eval/success"


@dataclass(frozen=True)
class Recorded:
    """A run as the alarm sees it: the metrics of each step, of which one that was not finite is None."""

    study: str
    cell: str
    seed: int
    lines: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Judged:
    """What happened to a run: the step from which on success stayed below half of its best so far (None: no collapse),
    the first alarm, and the highest mean update distance; of a collapsed run only up to ``AHEAD`` steps before the
    collapse (None: it had no such step)."""

    lost: int | None
    alarm: Alarm | None
    mean_update_distance: float | None

    @property
    def lead(self) -> int | None:
        """Steps from the alarm to the collapse, negative for a late alarm; None without an alarm or a collapse."""
        return None if self.lost is None or self.alarm is None else self.lost - self.alarm.step


class Figures(NamedTuple):
    """How many runs collapsed, how many of these had an alarm at least ``AHEAD`` steps before, how many did not
    collapse, and how many of those had a false alarm."""

    collapsed: int
    ahead: int
    healthy: int
    alarmed: int


def read_runs(paths: Sequence[Path]) -> list[Recorded]:
    """Read runs from run folders, from studies' folders, and from files of recorded runs as docs/stability has them.
    Raises ``UserError`` if there is no such folder or file, for a folder without metrics, and for a line that is not a
    recorded run."""
    runs: list[Recorded] = []
    for path in paths:
        if path.is_file():
            runs += _read_records(path)
        else:
            runs += [_read_run(folder.path, folder.cell or folder.path.name) for folder in find_runs([path])]
    return runs


def _read_run(path: Path, cell: str) -> Recorded:
    run_dir = RunDir(path)
    if not run_dir.metrics.is_file():
        raise UserError(f"{path} is not a run folder: it has no {run_dir.metrics.name}")
    lines = list(read_jsonl(run_dir.metrics))
    for number, line in enumerate(lines, start=1):
        if not _are_metrics(line):
            raise UserError(
                f"{run_dir.metrics}, line {number}: these are not the metrics of a step; give the folder of another run"
            )
    return Recorded(path.parent.parent.name, cell, read_resolved(run_dir.config, check=False).seed, lines)


def _are_metrics(line: Mapping[str, Any]) -> bool:
    values = (value for name, value in line.items() if name.startswith(("loss/", "rollout/", SUCCESS)))
    return type(line.get("step")) is int and all(isinstance(value, int | float | None) for value in values)


def _read_records(path: Path) -> list[Recorded]:
    """One JSON object a line: which run it is, and for each metric the list of its values over the steps."""
    runs = []
    for number, text in enumerate(path.read_bytes().splitlines() or [b""], start=1):  # an empty file is none
        try:
            run = read_json(text)
            names = ["step", *(name for name in run if "/" in name)]  # the metrics
            rows = zip(*(run[name] for name in names), strict=True)
            lines = [
                {k: None if v == NOT_FINITE else v for k, v in zip(names, row, strict=True) if v is not None}
                for row in rows
            ]
            if not all(map(_are_metrics, lines)):
                raise ValueError("a figure is not a number")
            runs.append(Recorded(run["study"], run["cell"], run["seed"], lines))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: this is not a recorded run ({error!r}); give a run folder, or a file of "
                "recorded runs"
            ) from error
    return runs


def judge(run: Recorded, limits: AlarmConfig) -> Judged:
    """Replay the alarm with these limits on a run."""
    watch, found, distances = CollapseAlarm(limits), None, []
    best, lost = 0.0, None
    for line in run.lines:
        found = watch.observe(line["step"], line) or found
        distances.append((line["step"], watch.mean_update_distance))
        success = line.get(SUCCESS)
        if success is not None:
            best = max(best, success)
            lost = (lost or line["step"]) if success < COLLAPSED * best else None
    early = [distance for step, distance in distances if lost is None or step <= lost - AHEAD]
    return Judged(lost, found, max(early, default=None))


def count(judged: Sequence[Judged]) -> Figures:
    """Count collapses and alarms."""
    lost = [one for one in judged if one.lost is not None]
    healthy = [one for one in judged if one.lost is None]
    ahead = sum(one.lead is not None and one.lead >= AHEAD for one in lost)
    return Figures(len(lost), ahead, len(healthy), sum(one.alarm is not None for one in healthy))


def table(runs: Sequence[Recorded], judged: Sequence[Judged]) -> str:
    """A Markdown table with a row per run, and below it what they add up to."""
    heads = ["run", "seed", "steps", "peak", "final", "collapse step", "alarm step", "steps ahead"]
    heads += ["highest mean_update_distance", "signals"]
    rows = []
    for run, one in zip(runs, judged, strict=True):
        success = [line[SUCCESS] for line in run.lines if line.get(SUCCESS) is not None]
        steps = run.lines[-1]["step"] if run.lines else 0
        row = [run.cell, run.seed, steps, max(success, default=None), *(success[-1:] or [None]), one.lost]
        row += [one.alarm.step if one.alarm else None, one.lead, one.mean_update_distance]
        row.append(", ".join(one.alarm.signals) if one.alarm else None)
        rows.append(["" if v is None else format_number(v) if isinstance(v, float) else v for v in row])
    found = count(judged)
    return (
        f"{markdown_table(heads, rows)}\n\n{found.collapsed} collapsed (success stayed below half its peak), "
        f"{found.ahead} of them with an alarm {AHEAD} or more steps before the collapse.\n"
        f"{found.healthy} did not, {found.alarmed} of them with a false alarm."
    )
