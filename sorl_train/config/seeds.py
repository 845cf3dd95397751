"""All randomness is derived from the run's seed and a counter, so that resuming needs no generator's state."""

from __future__ import annotations

import zlib

import numpy as np


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """A seed for ``stream`` ("rollout", "eval", ..) at a position; independent between streams and positions."""
    words = (seed, zlib.crc32(stream.encode()), *counters)
    return int(
        np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(2)
    )  # room to add turns


def generator(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """A numpy generator at that position."""
    return np.random.default_rng(derive_seed(seed, stream, *counters))
