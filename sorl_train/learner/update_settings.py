"""What a run's settings mean to its learner: the policy loss, mini-batches, learning rates."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.outside import call_outside
from sorl_train.config.seeds import generator
from sorl_train.config.settings import OptimConfig, TrainConfig, UpdateConfig
from sorl_train.learner.batch import Batch
from sorl_train.losses.policy import SURROGATES, ClipRange, LossSettings, Surrogate


def loss_settings(config: TrainConfig) -> LossSettings:
    """Which policy loss both engines take. Raises ``UserError`` if a surrogate from outside does not work."""
    algorithm, loss = config.algorithm, config.loss
    clip = ClipRange(loss.clip_eps, loss.clip_eps_high, loss.dual_clip, loss.sapo_tau_pos, loss.sapo_tau_neg)
    if callable(algorithm.surrogate):
        _try_surrogate(config.algo, algorithm.surrogate, clip)
        surrogate: Surrogate = functools.partial(call_outside, algorithm.surrogate)
    else:
        surrogate = SURROGATES[algorithm.surrogate]
    return LossSettings(algorithm.ratio, surrogate, clip, loss.aggregation)


def _try_surrogate(algo: str, surrogate: Surrogate, clip: ClipRange) -> None:
    """Try a surrogate from outside on four tokens, so that a mistake in it shows before the first rollout."""
    log_ratio = torch.tensor([-0.5, -0.01, 0.02, 0.6], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    what = f"algo {algo}: its surrogate {getattr(surrogate, '__qualname__', surrogate)}"
    try:
        values: object = call_outside(surrogate, log_ratio.exp(), advantage, clip)
        if (
            not isinstance(values, Tensor)
            or values.shape != log_ratio.shape
            or not values.is_floating_point()
        ):
            got = f"{tuple(values.shape)} {values.dtype}" if isinstance(values, Tensor) else repr(values)
            raise UserError(f"{what} returned {got} for 4 tokens; it has to return a tensor of 4 floats")
        if not values.requires_grad:
            raise UserError(f"{what} has no gradient with respect to the ratio: is all of it detached?")
        (gradient,) = torch.autograd.grad(values.sum(), log_ratio)
    except UserError:
        raise
    except Exception as error:  # it is the user's code, which may raise anything
        raise UserError(f"{what} failed on 4 tokens: {type(error).__name__}: {error}") from error
    if not (torch.isfinite(values).all() and torch.isfinite(gradient).all()):
        raise UserError(f"{what} is not finite for ratios of 0.6 to 1.8: {values.tolist()}")


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


def steps_of_batch(batch_size: int, update: UpdateConfig) -> int:
    """Optimizer steps on a rollout batch without excluded trajectories."""
    return update.epochs * -(-batch_size // update.mini_batch_size)


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


def learning_rates(
    optim: OptimConfig, base: float, warmup_ratio: float, done: int, total: int
) -> Iterator[float]:
    """The learning rates of the optimizer steps after the first ``done`` of the run's ``total``."""
    return (learning_rate(optim, base, warmup_ratio, number, total) for number in itertools.count(done))


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
