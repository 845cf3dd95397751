"""``sorl-lab alarm``: replays the collapse alarm on finished runs, with its default limits or with others.

The default limits were chosen on runs of one size. On runs of your own, some stable and some collapsed, this shows how
early the alarm would have come, how often it would have been false, and which limit would separate the two kinds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.figures import figure, markdown_table
from sorl_env.text import read_json
from sorl_train.config.files import read_resolved
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.report.groups import find_runs
from sorl_train.run.alarm import Alarm, CollapseAlarm
from sorl_train.run.files import atomic_write, read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.summary import COLLAPSED

NOT_FINITE = "not finite"  # in a file of records, where null stands for a metric that the step does not have
AHEAD = 5  # an alarm this many steps before the collapse leaves time to react
SUCCESS = "eval/success"
SEEN = (  # what the alarm reads
    "loss/approx_kl",
    "loss/grad_norm",
    "loss/grad_norm_max",
    "loss/entropy",
    "rollout/valid_turn_rate",
)
SOME = ("loss/trust_kl", "rollout/turns")  # read too, where a run has them
LIMITS = tuple(field.name for field in dataclasses.fields(AlarmConfig) if field.name != "action")


@dataclass(frozen=True)
class Recorded:
    """A run as the alarm sees it: the metrics that the alarm reads, and the evaluations.

    Attributes:
        study, cell, seed: which run it is.
        lines: a mapping for each step. A metric that the step does not have is absent; one that was not finite is None.
    """

    study: str
    cell: str
    seed: int
    lines: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Judged:
    """What happened to a run, and what the alarm said.

    Attributes:
        lost: the collapse step, from which on success stayed below half of its best so far; None: no collapse.
        alarm: the first alarm.
        strain: the highest strain; of a collapsed run only up to ``AHEAD`` steps before the collapse (None: it had
            no such step).
    """

    lost: int | None
    alarm: Alarm | None
    strain: float | None

    @property
    def lead(self) -> int | None:
        """Steps from the alarm to the collapse, negative for a late alarm; None without an alarm or a collapse."""
        return None if self.lost is None or self.alarm is None else self.lost - self.alarm.step


@dataclass(frozen=True)
class Figures:
    """How the alarm did on several runs.

    Attributes:
        collapsed: runs that collapsed. Of these, ``ahead`` had an alarm at least ``AHEAD`` steps before the collapse,
            ``before`` at least one step before it, ``in_time`` no later than the collapse itself; ``possible`` are
            those that ran long enough for an alarm ``AHEAD`` steps before.
        healthy: runs that did not collapse; ``alarmed`` of these had a false alarm.
    """

    collapsed: int
    ahead: int
    before: int
    in_time: int
    possible: int
    healthy: int
    alarmed: int


def read_runs(paths: Sequence[Path]) -> list[Recorded]:
    """Read runs from run folders, from studies' folders, and from files that ``--records`` wrote.

    Raises:
        UserError: no such folder or file, a folder without metrics, or a line that is not a recorded run.
    """
    runs: list[Recorded] = []
    for path in paths:
        if path.is_file():
            runs += _read_records(path)
        else:
            runs += [_read_run(folder.path, folder.cell or folder.path.name) for folder in find_runs([path])]
    return runs


def _read_run(path: Path, cell: str) -> Recorded:
    run_dir, kept = RunDir(path), ("step", SUCCESS, *SEEN, *SOME)
    if not run_dir.metrics.is_file():
        raise UserError(f"{path} is not a run folder: it has no {run_dir.metrics.name}")
    lines = [{name: line[name] for name in kept if name in line} for line in read_jsonl(run_dir.metrics)]
    for number, line in enumerate(lines, start=1):
        if type(line.get("step")) is not int or not all(
            isinstance(v, int | float | None) for v in line.values()
        ):
            raise UserError(
                f"{run_dir.metrics}, line {number}: these are not the metrics of a step; give the folder of another run"
            )
    return Recorded(path.parent.parent.name, cell, read_resolved(run_dir.config, check=False).seed, lines)


def _read_records(path: Path) -> list[Recorded]:
    runs = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            run = read_json(text)
            names = ("step", SUCCESS, *SEEN, *(name for name in SOME if name in run))
            rows = zip(*(run[name] for name in names), strict=True)
            lines = [
                {k: None if v == NOT_FINITE else v for k, v in zip(names, row, strict=True) if v is not None}
                for row in rows
            ]
            runs.append(Recorded(run["study"], run["cell"], run["seed"], lines))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: this is not a recorded run ({error!r}); give a file that --records writes"
            ) from error
    return runs


def write_records(runs: Sequence[Recorded], path: Path) -> None:
    """Write one line per run: which it is, and for each metric its values over the steps, with four digits."""

    def recorded(value: float | None) -> float | str:
        return NOT_FINITE if value is None else float(f"{value:.4g}")

    lines = []
    for run in runs:
        some = [name for name in SOME if any(name in line for line in run.lines)]
        columns = {
            name: [recorded(line[name]) if name in line else None for line in run.lines]
            for name in (SUCCESS, *SEEN, *some)
        }
        which = {"study": run.study, "cell": run.cell, "seed": run.seed}
        lines.append(which | {"step": [line["step"] for line in run.lines]} | columns)
    atomic_write(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def judge(run: Recorded, limits: AlarmConfig) -> Judged:
    """Replay the alarm with these limits on a run."""
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
    """Count collapses and alarms."""
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


def row_of(run: Recorded, judged: Judged) -> dict[str, Any]:
    """A run's row in the table, by heading; None where it has no such figure."""
    success = [line[SUCCESS] for line in run.lines if line.get(SUCCESS) is not None]
    return {
        "run": run.cell,
        "seed": run.seed,
        "steps": run.lines[-1]["step"] if run.lines else 0,
        "peak": max(success, default=None),
        "final": success[-1] if success else None,
        "collapse step": judged.lost,
        "alarm step": judged.alarm.step if judged.alarm else None,
        "steps ahead": judged.lead,
        "highest strain": judged.strain,
        "signals": ", ".join(judged.alarm.signals) if judged.alarm else None,
    }


def table(runs: Sequence[Recorded], judged: Sequence[Judged]) -> str:
    """A Markdown table with a row per run, and below it what they add up to."""
    rows = [row_of(*pair) for pair in zip(runs, judged, strict=True)]
    cells = [
        ["" if v is None else figure(v) if isinstance(v, float) else v for v in row.values()] for row in rows
    ]
    found = count(judged)
    lines = [
        f"{found.collapsed} collapsed (success stayed below half its peak), {found.healthy} did not.",
        f"Collapsed runs: {found.ahead} had an alarm {AHEAD} or more steps before the collapse ({found.possible} ran "
        f"long enough for that), {found.before} at least one step before, {found.in_time} no later than it.",
        f"Other runs: {found.alarmed} had a false alarm.",
    ]
    held = [one.strain for one in judged if one.lost is None and one.strain is not None]
    lost = [one.strain for one in judged if one.lost is not None and one.strain is not None]
    if held and lost:
        between = (
            "a value of alarm.strain between them" if max(held) < min(lost) else "no value of alarm.strain"
        )
        lines.append(
            f"Highest strain of a run that did not collapse: {max(held):.3f}. Lowest of a collapsed run, {AHEAD} steps "
            f"before the collapse: {min(lost):.3f}. So {between} separates the two kinds."
        )
    return "\n".join([markdown_table(list(rows[0]), cells), "", *lines])
