"""The data of the report's curves, for the script of the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sorl_train.report.figures import FIGURES, Figure
from sorl_train.report.groups import Group, choices, setting_text
from sorl_train.report.run import ALARM, ReportRun, Row, is_number

# The parts of a step in timings.jsonl, which do not overlap.
STAGES = ("rollout", "log_probs", "update", "eval", "checkpoint")
FEW = 8  # up to so many groups have a colour and a switch each; more are chosen by their settings
MOST_VALUES = 1_500_000  # in a page, where they take about 12 MB


def chart_data(
    runs: Sequence[ReportRun], groups: Sequence[Group], names: Sequence[str], most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """What the page's script draws: figures, groups, and for each run its steps and the values of each metric.

    ``more`` are figures of one metric each, for the metrics that no other figure shows. ``every`` is usually 1; with
    more values than ``most_values``, only one of ``every`` steps is drawn, and each step with an evaluation.
    """
    rows = [_joined(run) for run in runs]
    metrics = sorted({name for run_rows in rows for row in run_rows for name in row if name != "step"})
    shown = {name for figure in FIGURES for name in figure.curves}
    others = [name for name in metrics if name not in shown]
    more = [Figure(f"more-{i}", name, "", {name: ""}) for i, name in enumerate(others)]
    every = math.ceil(sum(map(len, rows)) * len(metrics) / most_values) or 1
    kept = [
        [row for i, row in enumerate(run_rows) if _is_drawn(row, i, run_rows, every)] for run_rows in rows
    ]
    return {
        "figures": [dataclasses.asdict(figure) for figure in FIGURES if _has_data(figure, rows)],
        "more": [dataclasses.asdict(figure) for figure in more if _has_data(figure, rows)],
        "every": every,
        "choices": choices(groups) if len(groups) > FEW else {},
        "groups": [
            {
                "label": group.label,
                "members": group.members,
                "settings": {name: setting_text(value) for name, value in group.settings.items()},
            }
            for group in groups
        ],
        "runs": [
            {
                "label": name,
                "finished": run.finished,
                "delta": run.config.get("loss.clip_bias_delta") if run.normalizes else None,
                "alarms": [event["step"] for event in run.events if event["kind"] == ALARM],
                "steps": [row["step"] for row in run_rows],
                "values": {metric: _column(run_rows, metric) for metric in metrics},
            }
            for run, name, run_rows in zip(runs, names, kept, strict=True)
        ],
    }


def missing_figures(runs: Sequence[ReportRun]) -> list[str]:
    """Titles of the figures for which no run has a value, though every run of reinforcement learning should."""
    rows = [_joined(run) for run in runs]
    return [figure.title for figure in FIGURES if not (figure.optional or _has_data(figure, rows))]


def stage_seconds(run: ReportRun) -> dict[str, float]:
    """Seconds of the whole run by stage, longest first; ``other`` is the time of the steps outside all stages."""
    totals = {stage: sum(_values(run.timings, f"time/{stage}_s")) for stage in STAGES}
    totals["other"] = sum(_values(run.timings, "time/step_s")) - sum(totals.values())
    return {
        name: seconds for name, seconds in sorted(totals.items(), key=lambda item: -item[1]) if seconds > 0
    }


def _joined(run: ReportRun) -> list[Row]:
    """One row per step, with its metrics and timings."""
    rows: dict[int, dict[str, Any]] = {}
    for row in (*run.metrics, *run.timings):
        rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _is_drawn(row: Row, i: int, rows: Sequence[Row], every: int) -> bool:
    return i % every == 0 or i == len(rows) - 1 or "eval/success" in row


def _has_data(figure: Figure, rows: Sequence[Sequence[Row]]) -> bool:
    return any(is_number(row.get(name)) for run_rows in rows for row in run_rows for name in figure.curves)


def _column(rows: Sequence[Row], name: str) -> list[float | None]:
    """A metric at each step, with six digits, which is all a plot can show; None where it has no value."""
    return [float(f"{row[name]:.6g}") if is_number(row.get(name)) else None for row in rows]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if is_number(row.get(name))]
