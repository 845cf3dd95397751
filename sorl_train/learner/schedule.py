"""Mini-batches of a rollout batch, the learning rate of each optimizer step, and whether there is only one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sorl_train.config.seeds import generator
from sorl_train.config.settings import OptimConfig, TrainConfig
from sorl_train.learner.batch import Batch


def mini_batches(batch: Batch, config: TrainConfig, step: int) -> Iterator[Batch]:
    """Each epoch visits every trajectory once, in an order that the seed, the step and the epoch determine.

    They are spread evenly over as few mini-batches as can hold them: 25 trajectories at a size of 8 become mini-batches
    of 7, 6, 6 and 6. A last one of a single trajectory would have a step as long as the others', because Adam divides
    by the size of the gradient. Replayed trajectories that come on top make mini-batches larger, not more.
    """
    count = -(-min(len(batch), config.rollout.batch_size) // config.update.mini_batch_size)
    for epoch in range(config.update.epochs):
        order = generator(config.seed, "mini_batches", step, epoch).permutation(len(batch))
        for part in np.array_split(order, count):
            yield batch.rows(part.tolist())


def steps_of_batch(config: TrainConfig) -> int:
    """Optimizer steps on a rollout batch without excluded trajectories."""
    return config.update.epochs * -(-config.rollout.batch_size // config.update.mini_batch_size)


def is_on_policy(config: TrainConfig, step: int) -> bool:
    """Whether the batch after ``step`` steps is trained on in a single optimizer step by the weights that sampled it.

    The old log-probabilities are then those of the step's own forward pass, and need no pass before it, unless
    something else asks for them: the KL in the reward, a correction for the sampler, or replay, which keeps them.
    """
    update, loss = config.update, config.loss
    if step < config.critic_warmup_steps:  # the actor takes no step
        return False
    one_step = update.epochs == 1 and update.mini_batch_size >= config.rollout.batch_size
    kl_in_reward = loss.kl_coef > 0 and loss.kl_in == "reward"
    asked_for = kl_in_reward or config.correction.is_on or config.replay.size > 0
    return one_step and config.rollout.max_staleness == 0 and not asked_for


def learning_rate(optim: OptimConfig, base: float, warmup_ratio: float, done: int, total: int) -> float:
    """Learning rate of optimizer step ``done`` (0-based) of ``total``: a linear warm-up, then the schedule."""
    warmup = round(warmup_ratio * total)
    if done < warmup:
        return base * (done + 1) / warmup
    if optim.schedule == "constant":
        return base
    progress = (done - warmup) / max(1, total - warmup)
    if optim.schedule == "linear":
        return base * (1.0 - progress)
    return base * (0.5 * (1.0 + math.cos(math.pi * progress)))
