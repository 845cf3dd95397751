"""Bootstrap intervals and paired tests over questions. Nothing is assumed about how the scores are distributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sorl_train.run.bootstrap import bootstrap, percentile_interval

DRAWS = 10_000


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% percentile bootstrap interval; NaN for no values."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean of one value per question, with its interval."""
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    low, high = percentile_interval(bootstrap(values, draws=draws, seed=seed))
    return Interval(float(np.mean(values)), low, high)


@dataclass(frozen=True)
class Paired:
    """How B differs from A over the same questions.

    Attributes:
        difference: mean of B - A, with the interval of a paired bootstrap, which draws whole questions.
        bootstrap_p: two-sided, twice the share of resamples on the other side of 0 (at least 1 / draws).
        mcnemar_p: p-value of the two-sided exact McNemar test; None where scores are not all 0 or 1.
        gained, lost: how many questions have a higher, or a lower, score in B.
    """

    questions: int
    mean_a: float
    mean_b: float
    difference: Interval
    bootstrap_p: float
    mcnemar_p: float | None
    gained: int
    lost: int


def paired(a: Sequence[float], b: Sequence[float], draws: int = DRAWS, seed: int = 0) -> Paired:
    """Compare two lists of scores with one value per question, in the same order."""
    before, after = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    differences = after - before
    means = bootstrap(differences.tolist(), draws=draws, seed=seed)
    tail = min(int((means <= 0).sum()), int((means >= 0).sum())) / draws
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    binary = bool(np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all())
    return Paired(
        questions=len(differences),
        mean_a=float(before.mean()),
        mean_b=float(after.mean()),
        difference=Interval(float(differences.mean()), *percentile_interval(means)),
        bootstrap_p=min(1.0, max(2 * tail, 1 / draws)),
        mcnemar_p=mcnemar_exact(gained, lost) if binary else None,
        gained=gained,
        lost=lost,
    )


def mcnemar_exact(gained: int, lost: int) -> float:
    """The p-value of the two-sided exact McNemar test: could a change be a gain or a loss with equal chance?

    >>> mcnemar_exact(5, 0)
    0.0625
    """
    changed = gained + lost
    tail = sum(math.comb(changed, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)
