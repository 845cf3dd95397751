"""What the optimizer steps take from a run's settings. Only ``update_settings`` here knows where it stands there."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.outside import call_outside
from sorl_train.config.settings import LossConfig, OptimConfig, TrainConfig, UpdateConfig
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.surrogates import SURROGATES, ClipRange, Surrogate


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of ``PolicyUpdate`` and ``CriticUpdate``: three sections of the config, and what follows from several.

    Attributes:
        loss: which policy loss.
        normalize: whether the algorithm scales its steps by the clipping bias.
        kl_coef: weight of the KL term in the loss; 0 when the KL is in the reward.
        trust_kl: limit of ``TrustRegion``; None: there is none.
        temperature: the sampler's, which the log-probabilities are computed at.
        dtype: precision of the forward passes, as ``hardware.dtype`` names it.
        keep_dropout: only supervised fine-tuning trains with dropout.
    """

    objective: LossConfig
    update: UpdateConfig
    optim: OptimConfig
    loss: LossSettings
    normalize: bool
    kl_coef: float
    trust_kl: float | None
    temperature: float
    dtype: str
    keep_dropout: bool


def update_settings(config: TrainConfig) -> UpdateSettings:
    """The part of a run's settings that its optimizer steps need, for both engines."""
    algorithm, loss = config.algorithm, config.loss
    clip = ClipRange(loss.clip_eps, loss.clip_eps_high, loss.dual_clip, loss.sapo_tau_pos, loss.sapo_tau_neg)
    if callable(algorithm.surrogate):
        _try_surrogate(config.algo, algorithm.surrogate, clip)
        surrogate: Surrogate = functools.partial(call_outside, algorithm.surrogate)
    else:
        surrogate = SURROGATES[algorithm.surrogate or "clipped"]
    return UpdateSettings(
        objective=loss,
        update=config.update,
        optim=config.optim,
        loss=LossSettings(algorithm.ratio, surrogate, clip, loss.aggregation),
        normalize=algorithm.normalize,
        kl_coef=loss.kl_coef if loss.kl_in == "loss" else 0.0,
        trust_kl=config.update.trust_kl if config.stage == "rl" else None,
        temperature=config.sampler.temperature,
        dtype=config.hardware.dtype,
        keep_dropout=config.stage == "sft",
    )


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
