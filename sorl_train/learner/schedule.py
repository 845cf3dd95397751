"""Mini-batches of a rollout batch, and the learning rate of each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sorl_train.config.seeds import generator
from sorl_train.config.settings import OptimConfig, TrainConfig
from sorl_train.learner.batch import Batch


def mini_batches(batch: Batch, config: TrainConfig, step: int) -> Iterator[Batch]:
    """Each epoch visits every trajectory once, in an order that the seed, the step and the epoch determine.

    If some trajectories of the rollout batch were excluded, the others are spread evenly over as few mini-batches as
    can hold them: 25 trajectories at a size of 8 become mini-batches of 7, 6, 6 and 6. Filling them up in turn could
    leave a single trajectory for the last one, and its step would be as long as the others', because Adam divides by
    the size of the gradient.
    """
    count = -(-len(batch) // config.update.mini_batch_size)
    for epoch in range(config.update.epochs):
        order = generator(config.seed, "mini_batches", step, epoch).permutation(len(batch))
        for part in np.array_split(order, count):
            yield batch.rows(part.tolist())


def steps_of_batch(config: TrainConfig) -> int:
    """Optimizer steps on a rollout batch without excluded trajectories."""
    return config.update.epochs * -(-config.rollout.batch_size // config.update.mini_batch_size)


def learning_rate(optim: OptimConfig, base: float, warmup_ratio: float, done: int, total: int) -> float:
    """Learning rate of optimizer step ``done`` (0-based) of ``total``: a linear warm-up, then the schedule."""
    warmup = round(warmup_ratio * total)
    if done < warmup:
        return base * (done + 1) / warmup
    if optim.schedule == "constant":
        return base
    progress = (done - warmup) / max(1, total - warmup)
    return base * (
        1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
