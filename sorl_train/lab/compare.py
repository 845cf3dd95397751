"""Which algorithm? Each at its own best learning rate of a study, and at ten times that rate.

A comparison at one rate for all says more about the rate than about the algorithms, and one at the best rate alone does
not say how much a wrong guess costs. So a study that is compared has arms and one axis, the learning rate, on which
several rates have their tenfold, too. Only these rates are run for all arms; ten times a rate is run where the rate
turned out to be the arm's best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.errors import UserError
from sorl_env.text import markdown_table
from sorl_train.lab.study import Study, StudyRun, with_range
from sorl_train.run.folder import NON_FINITE
from sorl_train.run.stability import COLLAPSED, step_seconds, success_curve

RATE = "optim.lr"
TIMES = 10.0
GOOD = 0.9  # success that ``steps_to`` waits for
CLOSE = 0.05  # two rates are the same if they differ by at most this share, as 1.6e-3 and 10 times 1.58e-4


def rates_of(study: Study) -> dict[float, float]:
    """The rates that are tried, each with its tenfold. Raises ``UserError`` if there are none, or for another axis."""
    axes = {name for run in study.runs for name, _ in run.point}
    if axes != {RATE}:
        found = ", ".join(sorted(axes)) or "none"
        raise UserError(f"study {study.name}: compare needs {RATE} as the only axis; its axes: {found}")
    rates = sorted({run.config.optim.lr for run in study.runs})
    pairs = {rate: ten for rate in rates for ten in rates if abs(ten / (TIMES * rate) - 1) <= CLOSE}
    if not pairs:
        known = ", ".join(f"{rate:g}" for rate in rates)
        raise UserError(
            f"study {study.name}: none of its rates {known} is {TIMES:g} times another; give rates and their tenfold"
        )
    return pairs


def first_runs(study: Study) -> list[StudyRun]:
    """The runs at the rates among which each arm's best is looked for."""
    rates = rates_of(study)
    return [run for run in study.runs if run.config.optim.lr in rates]


def tenfold_runs(study: Study, results: Sequence[Mapping[str, Any]]) -> list[StudyRun]:
    """The runs at ten times the best rate of each arm."""
    rates, best = rates_of(study), best_rates(study, results)
    return [run for run in study.runs if run.arm in best and run.config.optim.lr == rates[best[run.arm]]]


def best_rates(study: Study, results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Arm to the rate with the highest mean of final success; of equal ones the one that is good sooner, or lower.

    Arms that have not run at all of the rates are left out. A run that broke off counts as 0 (``with_lost``).
    """
    rates = rates_of(study)
    best: dict[str, float] = {}
    for arm in dict.fromkeys(run.arm for run in study.runs):
        cells = {rate: _at(results, arm, rate) for rate in rates}
        if all(cells.values()):
            soon = {rate: np.median([steps_to(run) for run in cell]) for rate, cell in cells.items()}
            best[arm] = max(rates, key=lambda rate: (_final(cells[rate]), -soon[rate], -rate))
    return best


def with_lost(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The results, and for each run that ended because a figure was not finite one in which it has lost everything.

    Without it the mean would be that of the seeds that survived. A run that goes on, or was killed, has no result.
    """
    finished = {run["id"] for run in results}
    found = [dict(run) for run in results]
    for run in study.runs:
        path = folder / "runs" / run.id
        if run.id in finished or not any(path.glob(NON_FINITE.format("*"))):
            continue
        curve = success_curve(path)
        peak = max((success for _, success in curve), default=1.0)
        figures = {"final": 0.0, "peak": peak or 1.0, "kept_mean": 0.0}
        found.append({**run.facts, **figures, "curve": curve, "lost": True})
    return found


def with_times(results: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The results with ``step_s``, the median seconds of a training step; they are the clock's, so no file of results
    has them."""
    seconds = {run["id"]: step_seconds(folder / "runs" / run["id"]) for run in results}
    return [{**run, "step_s": None if math.isnan(s := seconds[run["id"]]) else s} for run in results]


def steps_to(result: Mapping[str, Any], success: float = GOOD) -> float:
    """The step of the first evaluation with at least this success; infinite if there is none."""
    return next((float(step) for step, found in result["curve"] if found >= success), np.inf)


def table(study: Study, results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a line an arm, the highest final success first: means over seeds, with their range."""
    rates, best = rates_of(study), best_rates(study, results)
    # the median time of a training step, where it is known
    times = {
        arm: [run["step_s"] for run in _at(results, arm, rate) if run.get("step_s")]
        for arm, rate in best.items()
    }
    cost = {arm: float(np.median(found)) for arm, found in times.items() if found}
    lines = []
    for arm, rate in best.items():
        own, tenfold = _at(results, arm, rate), _at(results, arm, rates[rate])
        lost = sum(run["final"] < COLLAPSED * run["peak"] for run in tenfold)
        steps = [steps_to(run) for run in own]
        row = [
            arm,
            f"{rate:g}",
            mean_and_range([run["final"] for run in own]),
            " ".join("-" if math.isinf(step) else f"{step:g}" for step in steps),
            mean_and_range([run["final"] for run in tenfold]) if tenfold else "not run",
            f"{lost} of {len(tenfold)}" if tenfold else "",
            f"{cost[arm] / min(cost.values()):.2f}" if arm in cost else "",
        ]
        lines.append((_final(own), row))
    heads = ["", "best rate", "final success", f"steps to {GOOD:g}, by seed", f"at {TIMES:g} times the rate"]
    heads += ["collapsed there", "time of a step"]
    return markdown_table(heads, [row for _, row in sorted(lines, key=lambda line: -line[0])])


def _at(results: Sequence[Mapping[str, Any]], arm: str, rate: float) -> list[Mapping[str, Any]]:
    return [run for run in results if run["arm"] == arm and run[RATE] == rate]


def _final(runs: Sequence[Mapping[str, Any]]) -> float:
    return float(np.mean([run["final"] for run in runs]))


def mean_and_range(values: Sequence[float]) -> str:
    """The mean ``with_range``."""
    return with_range(np.mean, values, ".2f", " to ")
