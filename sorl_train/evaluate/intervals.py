"""Bootstrap intervals and paired tests over questions: numpy, seeded, nothing assumed of the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
LEVEL = 0.95
_AT_A_TIME = 4_000_000  # indices held in memory


@dataclass(frozen=True)
class Interval:
    """A mean and its percentile bootstrap interval at level 0.95; NaN for no values."""

    mean: float
    low: float
    high: float


def bootstrap_means(values: Sequence[float], draws: int = DRAWS, seed: int = 0) -> NDArray[np.float64]:
    """Means of ``draws`` resamples with replacement, (draws,)."""
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    rows = max(1, _AT_A_TIME // len(data))
    parts = [
        data[generator.integers(0, len(data), size=(min(rows, draws - first), len(data)))].mean(axis=1)
        for first in range(0, draws, rows)
    ]
    return np.concatenate(parts)


def mean_interval(values: Sequence[float], draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean of one value a question, with its interval."""
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    low, high = np.quantile(bootstrap_means(values, draws, seed), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.mean(np.asarray(values, dtype=np.float64))), float(low), float(high))


@dataclass(frozen=True)
class Paired:
    """How B differs from A over the same questions.

    Attributes:
        difference: mean of B - A, with the interval of a paired bootstrap (whole questions are drawn).
        bootstrap_p: two-sided, twice the share of resamples on the far side of 0 (at least 1 / draws).
        mcnemar_p: two-sided exact McNemar test; None where scores are not all 0 or 1.
        gained, lost: questions whose score is higher, lower, in B.
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
    """Compare two lists of scores, one value a question, in the same order."""
    before, after = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    differences = after - before
    means = bootstrap_means(differences.tolist(), draws, seed)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum())) / draws
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    binary = bool(np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all())
    return Paired(
        questions=len(differences),
        mean_a=float(before.mean()),
        mean_b=float(after.mean()),
        difference=Interval(float(differences.mean()), float(low), float(high)),
        bootstrap_p=min(1.0, max(2 * tail, 1 / draws)),
        mcnemar_p=mcnemar_exact(gained, lost) if binary else None,
        gained=gained,
        lost=lost,
    )


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided exact McNemar test: are ``gained`` of ``gained + lost`` changed questions a fair coin's heads?

    >>> mcnemar_exact(5, 0)
    0.0625
    """
    changed = gained + lost
    tail = sum(math.comb(changed, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)
