"""The policy loss of a run's settings."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.outside import call_outside
from sorl_train.config.settings import TrainConfig
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.surrogates import SURROGATES, ClipRange, Surrogate


def loss_settings(config: TrainConfig) -> LossSettings:
    """Which policy loss both engines take.

    Raises:
        UserError: a surrogate from outside does not work.
    """
    algorithm, loss = config.algorithm, config.loss
    clip = ClipRange(loss.clip_eps, loss.clip_eps_high, loss.dual_clip, loss.sapo_tau_pos, loss.sapo_tau_neg)
    if callable(algorithm.surrogate):
        _try_surrogate(config.algo, algorithm.surrogate, clip)
        surrogate: Surrogate = functools.partial(call_outside, algorithm.surrogate)
    else:
        surrogate = SURROGATES[algorithm.surrogate or "clipped"]
    return LossSettings(algorithm.ratio, surrogate, clip, loss.aggregation)


def _try_surrogate(algo: str, surrogate: Surrogate, clip: ClipRange) -> None:
    """Try a surrogate from outside on four tokens, so that a mistake in it shows before the first rollout.

    Raises:
        UserError: it fails, or what it returns cannot be maximized.
    """
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
