"""``sorl-lab alarm``: what the collapse alarm says of runs that are over, with its default limits or with others.

The limits were set at one scale. On a few runs of your own that held and that collapsed, this says how early they
would have been warned of and how often in vain, and between which two figures a limit would part them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_train.config.files import read_resolved
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.report.groups import find_runs
from sorl_train.run.alarm import Alarm, CollapseAlarm
from sorl_train.run.files import atomic_write, read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.summary import COLLAPSED

NOT_FINITE = "not finite"  # in a file of records, where null is a metric that the step does not have
AHEAD = 5  # steps between an alarm and the loss of half the peak, with which there is time to do something
SUCCESS = "eval/success"
SEEN = (  # by the alarm
    "loss/approx_kl",
    "loss/grad_norm",
    "loss/grad_norm_max",
    "loss/entropy",
    "rollout/valid_turn_rate",
)
LIMITS = tuple(
    field.name for field in dataclasses.fields(AlarmConfig) if field.name not in ("action", "roll_back_lr")
)


@dataclass(frozen=True)
class Recorded:
    """What the alarm looks at, step by step, and the success that an evaluation after the step found.

    Attributes:
        study, cell, seed: which run it is.
        lines: a mapping a step. A metric that the step does not have is absent; one that was not finite is None.
    """

    study: str
    cell: str
    seed: int
    lines: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Judged:
    """An alarm next to what became of the run.

    Attributes:
        lost: first step from which on success stayed below half of its best so far; None: it did not.
        alarm: the first one raised.
        strain: the highest; where there was a loss, of the steps ``AHEAD`` of it (None: there is no such step).
    """

    lost: int | None
    alarm: Alarm | None
    strain: float | None

    @property
    def lead(self) -> int | None:
        """Steps from the alarm to the loss, negative where it came after it; None without the one or the other."""
        return None if self.lost is None or self.alarm is None else self.lost - self.alarm.step


@dataclass(frozen=True)
class Figures:
    """Of some runs: how many collapsed, and were alarmed how long before; how many did not, and were alarmed.

    ``in_time`` is no later than the step that lost half the peak; ``possible`` are those where there was a step
    ``AHEAD`` of it.
    """

    collapsed: int
    ahead: int
    before: int
    in_time: int
    possible: int
    healthy: int
    alarmed: int


def read_runs(paths: Sequence[Path]) -> list[Recorded]:
    """Runs from their folders, from folders of studies, and from files that ``--records`` wrote.

    Raises:
        UserError: no such folder or file, a folder without metrics, or a line that is no recorded run.
    """
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
        raise UserError(f"{path} is no run: it has no {run_dir.metrics.name}")
    kept = ("step", SUCCESS, *SEEN)
    lines = []
    for number, line in enumerate(_read_metrics(run_dir.metrics), start=1):
        where = f"{run_dir.metrics}, line {number}"
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise UserError(f"{where}: not the metrics of a step; give the folder of another run")
        for name in (SUCCESS, *SEEN):
            if not isinstance(line.get(name), int | float | None):
                raise UserError(f"{where}: {name} is {line[name]!r}, a number is wanted; give another run")
        lines.append({name: line[name] for name in kept if name in line})
    return Recorded(path.parent.parent.name, cell, read_resolved(run_dir.config).seed, lines)


def _read_metrics(path: Path) -> list[Any]:
    try:
        return list(read_jsonl(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: it cannot be read ({error}); give the folder of another run") from error


def _read_records(path: Path) -> list[Recorded]:
    runs = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            run = read_json(text)
            columns = {name: run[name] for name in ("step", SUCCESS, *SEEN)}
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            lines = [
                {name: _value(value) for name, value in row.items() if value is not None} for row in rows
            ]
            runs.append(Recorded(run["study"], run["cell"], run["seed"], lines))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: no recorded run ({error!r}); --records writes them"
            ) from error
    return runs


def _value(value: Any) -> Any:
    return None if value == NOT_FINITE else value


def _recorded(value: float | None) -> float | str:
    return NOT_FINITE if value is None else float(f"{value:.4g}")


def write_records(runs: Sequence[Recorded], path: Path) -> None:
    """A line a run: which it is, and a column of values, with four digits, for each metric."""
    lines = []
    for run in runs:
        columns = {
            name: [_recorded(line[name]) if name in line else None for line in run.lines]
            for name in (SUCCESS, *SEEN)
        }
        which = {"study": run.study, "cell": run.cell, "seed": run.seed}
        lines.append(which | {"step": [line["step"] for line in run.lines]} | columns)
    atomic_write(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def judge(run: Recorded, limits: AlarmConfig) -> Judged:
    """What the alarm with these limits says of a run, and what became of it."""
    watch, found, strains = CollapseAlarm(limits), None, []
    best, lost = 0.0, None
    for line in run.lines:
        found = watch.observe(line["step"], line) or found
        strains.append((line["step"], watch.strain))
        success = line.get(SUCCESS)
        if success is not None:
            best = max(best, success)
            lost = (lost or line["step"]) if success < COLLAPSED * best else None
    early = [strain for step, strain in strains if lost is None or step <= lost - AHEAD]
    return Judged(lost, found, max(early, default=None))


def count(judged: Sequence[Judged]) -> Figures:
    """How many of them collapsed, and what the alarm saw of that."""
    lost = [one for one in judged if one.lost is not None]
    healthy = [one for one in judged if one.lost is None]
    leads = [one.lead for one in lost if one.lead is not None]
    return Figures(
        collapsed=len(lost),
        ahead=sum(lead >= AHEAD for lead in leads),
        before=sum(lead >= 1 for lead in leads),
        in_time=sum(lead >= 0 for lead in leads),
        possible=sum(one.lost is not None and one.lost > AHEAD for one in lost),
        healthy=len(healthy),
        alarmed=sum(one.alarm is not None for one in healthy),
    )


def table(runs: Sequence[Recorded], judged: Sequence[Judged]) -> str:
    """A Markdown table, a line a run, and below it what they come to."""
    lines = [
        "| run | seed | steps | peak | final | half lost in | alarm in | steps ahead | highest strain | why |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run, one in zip(runs, judged, strict=True):
        success = [line[SUCCESS] for line in run.lines if line.get(SUCCESS) is not None]
        columns = (
            run.cell,
            run.seed,
            run.lines[-1]["step"] if run.lines else 0,
            f"{max(success):.3f}" if success else "",
            f"{success[-1]:.3f}" if success else "",
            _shown(one.lost),
            _shown(one.alarm.step if one.alarm else None),
            _shown(one.lead),
            "" if one.strain is None else f"{one.strain:.3f}",
            ", ".join(one.alarm.signals) if one.alarm else "",
        )
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join([*lines, "", *_summary(judged)])


def _summary(judged: Sequence[Judged]) -> list[str]:
    found = count(judged)
    lines = [f"{found.collapsed} collapsed (success stayed below half its peak), {found.healthy} did not."]
    if found.collapsed:
        lines.append(
            f"Of those that did, {found.ahead} were alarmed {AHEAD} steps ahead or more ({found.possible} had so "
            f"many), {found.before} before, {found.in_time} no later than the step that lost it."
        )
    if found.healthy:
        lines.append(f"Of those that did not, {found.alarmed} were alarmed.")
    held = [one.strain for one in judged if one.lost is None and one.strain is not None]
    lost = [one.strain for one in judged if one.lost is not None and one.strain is not None]
    if held and lost:
        parts = "a limit between the two parts them" if max(held) < min(lost) else "no limit parts them"
        lines.append(
            f"Highest strain of one that did not: {max(held):.3f}; lowest of one that did, {AHEAD} steps ahead: "
            f"{min(lost):.3f}: {parts} (alarm.strain)."
        )
    return lines


def _shown(step: int | None) -> str:
    return "" if step is None else str(step)
