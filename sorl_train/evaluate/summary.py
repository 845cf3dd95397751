"""The figures of an evaluation: for each task and mode, means with their intervals."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sorl_train.evaluate.answers import ks, pass_at_k
from sorl_train.evaluate.intervals import mean_interval
from sorl_train.evaluate.results import EvalResult


def summarize(results: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """One entry per task and mode, in the order of the results."""
    return [_entry(task, mode, group) for (task, mode), group in by_task_and_mode(results).items()]


def by_task_and_mode(results: Sequence[EvalResult]) -> dict[tuple[str, str], list[EvalResult]]:
    """The results of each task and mode."""
    groups: dict[tuple[str, str], list[EvalResult]] = {}
    for result in results:
        groups.setdefault((result.task, result.mode), []).append(result)
    return groups


def _entry(task: str, mode: str, rows: Sequence[EvalResult]) -> dict[str, Any]:
    """All intervals are over questions, so the samples of a question are averaged first."""
    counted = [row for row in rows if not row.excluded]
    questions: dict[int, list[EvalResult]] = {}
    for row in counted:
        questions.setdefault(row.index, []).append(row)
    groups = list(questions.values())
    names = list(rows[0].scores)
    metrics = {
        name: _interval([fmean(row.scores[name] for row in group) for group in groups]) for name in names
    }
    if mode == "agent":
        metrics["reward"] = _interval([fmean(row.reward or 0.0 for row in group) for group in groups])
    turns = sum(len(row.turns) for row in counted)
    searched = [row.answer_in_retrieved for row in counted if row.answer_in_retrieved is not None]
    return {
        "task": task,
        "mode": mode,
        "main": names[0],
        "questions": len(groups),
        "samples": max((len(group) for group in groups), default=0),
        "excluded": len(rows) - len(counted),
        "metrics": metrics,
        "pass_at_k": _pass_at_k(groups, names[0]),
        "answered": _mean([row.answer is not None for row in counted]),
        "valid_turn_rate": sum(row.valid_turns for row in counted) / turns if turns else None,
        "turns": _mean([len(row.turns) for row in counted]),
        "searches": _mean([row.searches for row in counted]),
        "answer_in_retrieved": _mean(searched),
        "stop_reasons": dict(sorted(Counter(row.stop_reason for row in rows).items())),
        "tokens": {
            name: _mean([getattr(row, f"{name}_tokens") for row in counted])
            for name in ("prompt", "action", "observation")
        },
    }


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    found = dataclasses.asdict(mean_interval(values))
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def _pass_at_k(groups: Sequence[Sequence[EvalResult]], name: str) -> dict[str, dict[str, float | None]]:
    """pass@k over the questions that have all their samples; a score of 1 is a pass."""
    samples = max((len(group) for group in groups), default=0)
    if samples < 2:
        return {}
    whole = [group for group in groups if len(group) == samples]
    right = [sum(row.scores[name] >= 1.0 for row in group) for group in whole]
    return {str(k): _interval([pass_at_k(samples, count, k) for count in right]) for k in ks(samples)}


def _mean(values: Sequence[float]) -> float | None:
    return float(fmean(values)) if values else None
