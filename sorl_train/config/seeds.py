"""Random numbers, all derived from the run's seed and counters, so that resuming needs no generator's state."""

from __future__ import annotations

import zlib

import numpy as np


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """A seed for ``stream`` ("rollout", "eval", ..) at a position; independent between streams and positions."""
    words = (seed, zlib.crc32(stream.encode()), *counters)
    (state,) = np.random.SeedSequence(words).generate_state(1, np.uint64)
    return int(state >> np.uint64(2))  # below 2**62, so that the number of a turn can be added


def generator(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """A numpy generator with the seed that ``derive_seed`` gives."""
    return np.random.default_rng(derive_seed(seed, stream, *counters))
