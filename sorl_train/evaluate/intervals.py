"""Intervals of means over questions, and paired tests. A finite sample never gets an interval without width.

Values that are all 0 or 1 are shares and have closed forms: Wilson's interval for one share, that of Bonett and Price
(2012) for the paired difference of two. All other values are bootstrapped together with two made-up questions, which
are there for what the sample happens not to contain; without them nobody could draw a value that no question had.

Coverage of the 95%, mean and lowest. Shares, exactly, over 30 ways in which 2 to 70% of the questions change: Bonett
and Price .97 and .949 with 64 questions, .957 and .939 with 256; Tango's score interval, which has to be searched for,
.96 and .940, .951 and .945; the bootstrap's normal approximation .91 and .69, .94 and .88. Other values, in 14 kinds of
differences of F1 and of means of four samples, simulated with 30 questions: .97 and .93 with the two made-up questions,
.91 and .64 without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95  # of all intervals
SIGNIFICANT = 0.05  # a paired test must stay below it
DRAWS = 10_000
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
_NUMBERS_IN_MEMORY = 4_000_000

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval; NaN for no values."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean of one value per question, with Wilson's interval for a share and a bootstrap for the rest. The
    bootstrap's two made-up questions have the lowest and the highest possible score, which are 0 and 1 unless the
    values go beyond them."""
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if _is_share(data):
        return Interval(mean, *wilson(mean, len(data)))
    made_up = (min(0.0, float(data.min())), max(1.0, float(data.max())))
    return Interval(mean, *_percentiles(bootstrap([*values, *made_up], draws=draws, seed=seed)))


def wilson(share: float, questions: int) -> tuple[float, float]:
    """Wilson's score interval of a share.

    >>> [round(end, 3) for end in wilson(1.0, 30)]
    [0.886, 1.0]
    """
    square = _Z * _Z / questions
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / questions + square / (4 * questions))
    low, high = min(share, middle - half), max(share, middle + half)  # it holds the share, but for rounding
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Paired:
    """How B differs from A over the same questions. ``p`` is two-sided: could each change as well have been the
    opposite one? For shares it is of McNemar's exact test; for the rest the share of random signs for the differences
    that bring their mean at least as far from 0, which is at least 1 / (draws + 1). McNemar's test is that share over
    all signs."""

    questions: int
    mean_a: float
    mean_b: float
    difference: Interval  # mean of B - A
    p: float
    test: Literal["McNemar", "sign flips"]
    gained: int  # questions with a higher score in B
    lost: int

    @property
    def better(self) -> Literal["A", "B"] | None:
        """The better one, if the interval does not contain 0 and the test agrees."""
        if self.p >= SIGNIFICANT or self.difference.low <= 0 <= self.difference.high:
            return None
        return "B" if self.difference.low > 0 else "A"


def paired(a: Sequence[float], b: Sequence[float], draws: int = DRAWS, seed: int = 0) -> Paired:
    """Compare two lists of scores with one value per question, in the same order. The two made-up questions of the
    bootstrap, which draws whole questions, have the largest change that was seen, one in each direction; of 1 where
    nothing changed."""
    before, after = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    differences = after - before
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    shares = _is_share(before) and _is_share(after)
    if shares:
        ends, p = bonett_price(gained, lost, len(differences)), mcnemar_exact(gained, lost)
    else:
        change = float(np.abs(differences).max()) or 1.0
        drawn = bootstrap([*differences.tolist(), change, -change], draws=draws, seed=seed)
        ends, p = _percentiles(drawn), _sign_flip_p(differences, draws, seed)
    return Paired(
        questions=len(differences),
        mean_a=float(before.mean()),
        mean_b=float(after.mean()),
        difference=Interval(float(differences.mean()), *ends),
        p=p,
        test="McNemar" if shares else "sign flips",
        gained=gained,
        lost=lost,
    )


def bonett_price(gained: int, lost: int, questions: int) -> tuple[float, float]:
    """The adjusted Wald interval of a paired difference of shares: as if one more question were gained and one lost.

    >>> [round(end, 3) for end in bonett_price(5, 0, 5)]
    [0.196, 1.0]
    """
    total = questions + 2
    difference = (gained - lost) / total
    half = _Z * math.sqrt(((gained + lost + 2) / total - difference * difference) / total)
    return max(-1.0, difference - half), min(1.0, difference + half)


def mcnemar_exact(gained: int, lost: int) -> float:
    """The p-value of the two-sided exact McNemar test: could a change be a gain or a loss with equal chance?

    >>> mcnemar_exact(5, 0)
    0.0625
    """
    changed = gained + lost
    # the ways to choose 0 of the changes, then 1, and so on; all binomials anew would take minutes for 20,000
    tail = ways = 1
    for i in range(min(gained, lost)):
        ways = ways * (changed - i) // (i + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**changed)


def bootstrap(values: Sequence[float], *, draws: int = DRAWS, seed: int = 0) -> Values:
    """The means of ``draws`` samples of the values, each drawn with replacement, (draws,)."""
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    parts = [data[generator.integers(0, len(data), size)].mean(axis=1) for size in _parts(draws, len(data))]
    return np.concatenate(parts)


def _sign_flip_p(differences: Values, draws: int, seed: int) -> float:
    changes = differences[differences != 0]
    if not len(changes):
        return 1.0
    generator, total = np.random.default_rng(seed), changes.sum()
    sizes = _parts(draws, len(changes))
    kept = [generator.integers(0, 2, size, dtype=np.int8) @ changes for size in sizes]  # others change signs
    seen = abs(total) - 1e-9 * np.abs(changes).sum()  # sums in another order round differently
    return float((1 + (np.abs(2 * np.concatenate(kept) - total) >= seen).sum()) / (1 + draws))


def _parts(draws: int, count: int) -> list[tuple[int, int]]:
    """The shapes of arrays that hold ``draws`` rows of ``count`` numbers between them."""
    rows = max(1, _NUMBERS_IN_MEMORY // count)
    return [(min(rows, draws - first), count) for first in range(0, draws, rows)]


def _percentiles(drawn: Values) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _is_share(values: Values) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
