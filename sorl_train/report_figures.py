"""Which curves the report draws, and their points."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sorl_train.report_run import ReportRun, Row, is_number

# Parts of a step in timings.jsonl that do not overlap.
STAGES = ("rollout", "log_probs", "update", "eval", "checkpoint")


@dataclass(frozen=True)
class Figure:
    """One plot over training steps.

    Attributes:
        id: of its element in the page.
        about: what to look for, in a sentence.
        curves: metric names with what to call them.
        axis: ``share`` runs from 0 to 1, ``log`` leaves values out that are not positive.
        section: of the page.
        delta: draw the lower bound of the clipping-bias norm, from which on it scales the step down.
    """

    id: str
    title: str
    about: str
    curves: Mapping[str, str]
    axis: Literal["linear", "log", "share"] = "linear"
    section: Literal["curves", "time", "more"] = "curves"
    delta: bool = False


FIGURES = (
    Figure(
        "success",
        "Success",
        "Greedy on held-out questions, and sampled on the training batch.",
        {"eval/success": "held out, greedy", "rollout/success": "training, sampled"},
        "share",
    ),
    Figure(
        "valid-turns",
        "Valid turns",
        "Share of turns in the right format; it falls before a collapse.",
        {"eval/valid_turn_rate": "held out, greedy", "rollout/valid_turn_rate": "training, sampled"},
        "share",
    ),
    Figure(
        "grad-norm",
        "Gradient norm",
        "Of the policy, before clipping; an exploding one announces a collapse.",
        {"loss/grad_norm": "as computed", "loss/grad_norm_normalized": "normalized"},
        "log",
    ),
    Figure(
        "clip-frac",
        "Clip fraction",
        "Share of the policy's tokens whose ratio was clipped.",
        {"loss/clip_frac": "clipped"},
    ),
    Figure(
        "clip-bias",
        "Clipping-bias norm",
        "Triggers normalization above delta, the dashed line. Zero is off this axis.",
        {"loss/clip_bias_norm": "norm"},
        "log",
        delta=True,
    ),
    Figure(
        "normalizer",
        "Normalization factor",
        "1 leaves a step as it is. Means over the step's mini-batches.",
        {"loss/normalizer": "factor", "loss/normalized_frac": "share normalized"},
        "share",
    ),
    Figure(
        "kl",
        "KL divergence",
        "How far the policy moved in the update, and from the reference model.",
        {
            "loss/approx_kl": "to the old policy",
            "loss/ref_kl": "to the reference",
            "rollout/mismatch_kl": "sampler to trainer",
        },
    ),
    Figure("reward", "Reward", "Mean over the step's trajectories.", {"rollout/reward_mean": "reward"}),
    Figure(
        "entropy",
        "Entropy",
        "Of the policy at its own tokens, in nats; it shrinks as the policy settles.",
        {"loss/entropy": "entropy"},
    ),
    Figure(
        "step-time",
        "Seconds a step",
        "Wall time of each step and of its longest parts.",
        {"time/step_s": "step", "time/rollout_s": "rollout", "time/update_s": "update"},
        section="time",
    ),
    Figure(
        "tokens-per-s",
        "Tokens a second",
        "Sampled by the policy.",
        {"time/rollout_tokens_per_s": "during rollouts", "time/tokens_per_s": "over the whole step"},
        section="time",
    ),
)


def chart_data(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """What the page's script draws: the figures, and for each run its steps and the values of each metric.

    ``more`` are figures made of the metrics that no other figure shows, one each.
    """
    rows = [_joined(run) for run in runs]
    metrics = sorted({name for run_rows in rows for row in run_rows for name in row if name != "step"})
    shown = {name for figure in FIGURES for name in figure.curves}
    others = [name for name in metrics if name not in shown]
    more = [Figure(f"more-{i}", name, "", {name: ""}, section="more") for i, name in enumerate(others)]
    return {
        "figures": [dataclasses.asdict(figure) for figure in FIGURES if _has_data(figure, rows)],
        "more": [dataclasses.asdict(figure) for figure in more if _has_data(figure, rows)],
        "runs": [
            {
                "label": run.label,
                "delta": run.config.get("loss.clip_bias_delta"),
                "steps": [row["step"] for row in run_rows],
                "values": {name: _column(run_rows, name) for name in metrics},
            }
            for run, run_rows in zip(runs, rows, strict=True)
        ],
    }


def missing_figures(runs: Sequence[ReportRun]) -> list[str]:
    """Titles of the figures for which no run has a value."""
    rows = [_joined(run) for run in runs]
    return [figure.title for figure in FIGURES if not _has_data(figure, rows)]


def stage_seconds(run: ReportRun) -> dict[str, float]:
    """Seconds of the whole run by stage, longest first; ``other`` is what the steps took beyond their stages."""
    totals = {stage: sum(_values(run.timings, f"time/{stage}_s")) for stage in STAGES}
    totals["other"] = sum(_values(run.timings, "time/step_s")) - sum(totals.values())
    return {
        name: seconds for name, seconds in sorted(totals.items(), key=lambda item: -item[1]) if seconds > 0
    }


def _joined(run: ReportRun) -> list[Row]:
    """Metrics and timings of each step in one row."""
    rows: dict[int, dict[str, Any]] = {}
    for row in (*run.metrics, *run.timings):
        rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _has_data(figure: Figure, rows: Sequence[Sequence[Row]]) -> bool:
    return any(is_number(row.get(name)) for run_rows in rows for row in run_rows for name in figure.curves)


def _column(rows: Sequence[Row], name: str) -> list[float | None]:
    """A metric at each step, with the six digits a plot can show; None where it has no value."""
    return [float(f"{row[name]:.6g}") if is_number(row.get(name)) else None for row in rows]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if is_number(row.get(name))]
