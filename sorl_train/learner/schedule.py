"""Which trajectories an optimizer step is taken on, and at what learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sorl_train.config.seeds import generator
from sorl_train.config.settings import OptimConfig, TrainConfig
from sorl_train.learner.batch import Batch


def mini_batches(batch: Batch, config: TrainConfig, step: int) -> Iterator[Batch]:
    """Each epoch visits every trajectory once, in an order given by the seed, the step and the epoch.

    Where some trajectories of the rollout batch were excluded, those that are left are spread evenly over as few
    mini-batches as hold them: of 25 at a size of 8, over 7, 6, 6 and 6. A last one of a single trajectory would take as
    long a step as the others, since Adam divides out how large a gradient is.
    """
    count = -(-len(batch) // config.update.mini_batch_size)
    for epoch in range(config.update.epochs):
        order = generator(config.seed, "mini_batches", step, epoch).permutation(len(batch))
        for part in np.array_split(order, count):
            yield batch.rows(part.tolist())


def steps_of_batch(config: TrainConfig) -> int:
    """Optimizer steps for each rollout batch from which no trajectory was excluded."""
    return config.update.epochs * -(-config.rollout.batch_size // config.update.mini_batch_size)


def learning_rate(optim: OptimConfig, base: float, warmup_ratio: float, done: int, total: int) -> float:
    """Rate of optimizer step ``done`` (0-based) of ``total``: a linear warm-up, then the schedule."""
    warmup = round(warmup_ratio * total)
    if done < warmup:
        return base * (done + 1) / warmup
    if optim.schedule == "constant":
        return base
    progress = (done - warmup) / max(1, total - warmup)
    return base * (
        1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
