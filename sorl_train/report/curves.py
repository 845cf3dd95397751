"""The data of the report's curves, for the script of the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sorl_train.report.figures import SECTIONS, Figure
from sorl_train.report.groups import Group, choices, setting_text
from sorl_train.report.run import ALARM, MetricRow, ReportRun, is_number

# The parts of a step in timings.jsonl, which do not overlap.
STAGES = ("rollout", "log_probs", "update", "eval", "checkpoint")
FEW = 8  # groups that have a colour and a switch each; where there are more, settings choose them


def chart_data(runs: Sequence[ReportRun], groups: Sequence[Group], names: Sequence[str]) -> dict[str, Any]:
    """What the page's script draws: figures, groups, and for each run its steps and the values of each metric.

    ``more`` are figures of one metric each, for the metrics that no other figure shows.
    """
    rows = [_joined(run) for run in runs]
    metrics = [name for name in _with_values(rows) if name != "step"]
    figures = [
        _as_json(figure, section.name)
        for section in SECTIONS
        for figure in section.figures
        if any(name in metrics for name in figure.metrics)
    ]
    shown = {name for figure in figures for name in figure["metrics"]}
    more = [_as_json(Figure(name, "", {name: ""}), "more") for name in metrics if name not in shown]
    return {
        "figures": figures,
        "more": more,
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
                "steps": [row["step"] for row in own],
                "values": {metric: _column(own, metric) for metric in metrics},
            }
            for run, name, own in zip(runs, names, rows, strict=True)
        ],
    }


def stage_seconds(run: ReportRun) -> dict[str, float]:
    """Seconds of the whole run by stage, longest first; ``other`` is the time of the steps outside all stages."""
    totals = {stage: _total(run.timings, f"time/{stage}_s") for stage in STAGES}
    totals["other"] = _total(run.timings, "time/step_s") - sum(totals.values())
    longest_first = sorted(totals.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in longest_first if seconds > 0}


def _joined(run: ReportRun) -> list[MetricRow]:
    """One row per step, with its metrics and timings."""
    rows: dict[int, dict[str, Any]] = {}
    for row in (*run.metrics, *run.timings):
        rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _with_values(rows: Sequence[Sequence[MetricRow]]) -> list[str]:
    return sorted({name for own in rows for row in own for name, value in row.items() if is_number(value)})


def _as_json(figure: Figure, section: str) -> dict[str, Any]:
    return {"id": figure.id, "section": section, **dataclasses.asdict(figure)}


def _column(rows: Sequence[MetricRow], name: str) -> list[float | None]:
    """A metric at each step, with six digits, which is all a plot can show; None where it has no value."""
    return [float(f"{row[name]:.6g}") if is_number(row.get(name)) else None for row in rows]


def _total(rows: Sequence[MetricRow], name: str) -> float:
    return sum(row[name] for row in rows if is_number(row.get(name)))
