"""How stable a finished run was: its highest success, how much of it was kept, and when it collapsed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from sorl_env.errors import UserError
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.summary import COLLAPSED

WINDOW = 3  # evaluations that ``kept_mean`` averages
SMALLEST_PEAK = 0.05  # below it a run has nothing that it could keep


def success_curve(run_dir: Path) -> list[tuple[int, float]]:
    """Step and success of each evaluation that was not lost to excluded trajectories."""
    lines = read_jsonl(RunDir(run_dir).metrics)
    evaluated = [line for line in lines if "eval/success" in line]
    return [(line["step"], success) for line in evaluated if (success := line["eval/success"]) is not None]


def learned(success: Sequence[float], questions: float) -> bool:
    """Whether success was ever clearly above that of the cold start, by two standard errors.

    A run that never was can have kept all of nothing: its final / peak is 1. Evaluations ask the same questions, so
    that two of one policy differ by less than the standard error of a sample. It is that of Agresti and Coull, with
    four made-up questions, of which two are right: a start at 0 has an error, too.

    Args:
        success: that of the cold start, then of the other evaluations.
        questions: how many an evaluation has.
    """
    share = (success[0] * questions + 2) / (questions + 4)
    return max(success) > share + 2 * math.sqrt(share * (1 - share) / (questions + 4))


def step_seconds(run_dir: Path) -> float:
    """The median time of a training step; NaN if the run kept no timings."""
    lines = read_jsonl(RunDir(run_dir).timings) if RunDir(run_dir).timings.is_file() else []
    times = [line["time/step_s"] for line in lines if line.get("time/step_s") is not None]
    return statistics.median(times) if times else math.nan


def measure(run_dir: Path) -> dict[str, float]:
    """The figures of a finished run that tell how stable it was; NaN where there is none.

    A step's figure that was not finite counts as infinite in ``max_grad_norm``, and is left out of means.

    Returns:
        peak, final: highest and last greedy success.
        kept: final / peak, 0 if hardly a question was ever solved. As the highest of many noisy evaluations is above
            what the policy can do, it is below 1 even for a run that lost nothing.
        kept_mean: the same of means over ``WINDOW`` evaluations in a row.
        learned: 1 if success was ever clearly above the cold start's, else 0; NaN if that was not evaluated.
        worst_drop: the deepest fall of success from its peak so far.
        collapse_step: the evaluation from which on success stayed below half of its peak.
        max_grad_norm, grad_norm: the highest and the mean gradient norm.
        normalized: share of optimizer steps that the clipping bias scaled.
        mean_rate: mean effective learning rate.
        moves_back: how often the trust region moved weights back; NaN without one.
        clip_frac: mean share of clipped tokens.

    Raises:
        UserError: the run has no evaluation or no training step in its metrics.
    """
    lines = list(read_jsonl(RunDir(run_dir).metrics))
    evaluated = [line for line in lines if "eval/success" in line and line["eval/success"] is not None]
    trained = [line for line in lines if "loss/grad_norm" in line]
    if not evaluated or not trained:
        raise UserError(f"{run_dir}: no evaluation or no training step in its metrics")
    steps, success = zip(*((line["step"], line["eval/success"]) for line in evaluated), strict=True)
    peaks = list(itertools.accumulate(success, max))
    peak, final = peaks[-1], success[-1]
    below = [value < COLLAPSED * top for value, top in zip(success, peaks, strict=True)]
    lasting = next((steps[i] for i in range(len(below)) if all(below[i:])), math.nan)

    # means of evaluations in a row; the evaluations themselves if there are not more, as one mean loses nothing
    width = WINDOW if len(success) > WINDOW else 1
    means = [math.fsum(success[i : i + width]) / width for i in range(len(success) - width + 1)]
    questions = min(
        line.get("eval/questions", math.nan) for line in evaluated
    )  # older versions did not log it
    is_known = steps[0] == 0 and not math.isnan(questions)

    def mean(name: str) -> float:
        known = [line[name] for line in trained if line[name] is not None]
        return math.fsum(known) / len(known) if known else math.nan

    return {
        "peak": peak,
        "final": final,
        "kept": _kept(success),
        "kept_mean": _kept(means),
        "learned": float(learned(success, questions)) if is_known else math.nan,
        "worst_drop": max(top - value for value, top in zip(success, peaks, strict=True)),
        "collapse_step": float(lasting),
        "max_grad_norm": max(infinite_if_none(line["loss/grad_norm_max"]) for line in trained),
        "normalized": mean("loss/normalized_frac"),
        "mean_rate": mean("loss/effective_lr"),
        "moves_back": math.fsum(line.get("loss/trust_moves_back", math.nan) for line in trained),
        "clip_frac": mean("loss/clip_frac"),
        "grad_norm": mean("loss/grad_norm"),
    }


def _kept(curve: Sequence[float]) -> float:
    """The last value divided by the highest; 0 if that is next to nothing."""
    return curve[-1] / max(curve) if max(curve) >= SMALLEST_PEAK else 0.0


def infinite_if_none(value: float | None) -> float:
    """A logged figure, which is None if it was not finite."""
    return math.inf if value is None else value
