"""Bootstrap resampling of a list of values, seeded, with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95  # of all intervals
_INDICES_IN_MEMORY = 4_000_000

Statistic = Callable[..., NDArray[np.float64]]  # np.mean, np.median: called with axis=1


def bootstrap(
    values: Sequence[float], statistic: Statistic = np.mean, *, draws: int = 10_000, seed: int = 0
) -> NDArray[np.float64]:
    """The statistic of ``draws`` samples of the values, each drawn with replacement, (draws,)."""
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    rows = max(1, _INDICES_IN_MEMORY // len(data))
    parts = [
        statistic(data[generator.integers(0, len(data), (min(rows, draws - first), len(data)))], axis=1)
        for first in range(0, draws, rows)
    ]
    return np.concatenate(parts)


def percentile_interval(drawn: NDArray[np.float64]) -> tuple[float, float]:
    """The ends of the interval that holds the middle ``LEVEL`` of what `bootstrap` drew."""
    # Between infinities there is nothing to interpolate: inf - inf is NaN.
    method: Literal["linear", "inverted_cdf"] = "linear" if np.isfinite(drawn).all() else "inverted_cdf"
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method=method)
    return float(low), float(high)
