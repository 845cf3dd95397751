"""The clipping bias, its norms, and the normalization they trigger. Pure torch.

Take ``c_t = 1[clipped] w_t A_t`` on the loss tokens, B trajectories in the mini-batch and ``n = |y|`` loss tokens in
each. The paper's clipping bias is C = E[(1/n) sum_t c_t] (eq:Cturn_def), a signed scalar, but its lemma is about
gradients in log-probability space and its figure shows the norm of a gradient. It does not say which norm of which
quantity it divides by, so the norm is a choice by name:

==========  ======================================================================================================
``scalar``  abs of the mean over trajectories of (1/n) sum c_t: eq:Cturn_def to the letter; signs cancel
``token``   L2 over all tokens of c_t
``rms``     root mean square of c_t over all tokens, clipped or not: ``token`` / sqrt(number of tokens)
``logit``   as ``token``, each term times ||d log p(y_t) / d logits||_2 = sqrt(1 - 2 p_y + sum p^2)
==========  ======================================================================================================

``token`` and ``logit`` grow with the square root of the number of tokens in a mini-batch, so a threshold for them
depends on its size and on the length of turns. ``rms`` depends on neither. docs/stability.md compares them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_train.algorithms import ClipBiasNorm, Target, check_choice
from sorl_train.losses.segments import Segments


@dataclass(frozen=True)
class LossStats:
    """Detached sums over the loss tokens of a micro-batch, which add up over micro-batches and ranks."""

    trajectories: Tensor  # number of those with at least one loss token
    tokens: Tensor  # number of loss tokens
    clipped: Tensor  # number of clipped ones
    signal: Tensor  # number of tokens with a nonzero advantage and a nonzero correction weight
    ratio_sum: Tensor  # of the ratio in the loss
    ratio_square_sum: Tensor
    log_ratio_square_sum: Tensor  # of the token's own log-ratio, at every ratio level
    bias_mean_sum: Tensor  # sum over trajectories of (1/n) sum_t c_t
    bias_square_sum: Tensor  # sum over tokens of c_t^2
    bias_logit_square_sum: (
        Tensor  # sum over tokens of (c_t logit_scale_t)^2; NaN when no ``logit_scale`` was given
    )

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def all_reduce(self) -> LossStats:
        """The sums over all ranks, or these sums where torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        packed = torch.stack([getattr(self, f.name) for f in fields(self)])
        dist.all_reduce(packed)
        return LossStats(*packed.unbind())

    def metrics(self) -> dict[str, float]:
        """Metrics by name.

        ``signal_frac``, ``clip_frac``: shares of the tokens. ``approx_kl``: mean(log_ratio^2) / 2, an estimate of
        KL(old || current) that is never negative and needs no exponential. ``ratio_mean``, ``ratio_std``: of the ratio
        in the loss.
        """
        tokens = max(float(self.tokens), 1.0)
        mean = float(self.ratio_sum) / tokens
        return {
            "signal_frac": float(self.signal) / tokens,
            "clip_frac": float(self.clipped) / tokens,
            "approx_kl": 0.5 * float(self.log_ratio_square_sum) / tokens,
            "ratio_mean": mean,
            "ratio_std": max(float(self.ratio_square_sum) / tokens - mean**2, 0.0) ** 0.5,
        }

    def norms(self) -> dict[str, float]:
        """Every norm of the clipping bias by name; ``logit`` only when ``logit_scale`` was given."""
        square = float(self.bias_square_sum)
        norms = {
            "scalar": abs(float(self.bias_mean_sum)) / max(float(self.trajectories), 1.0),
            "token": math.sqrt(square),
            "rms": math.sqrt(square / max(float(self.tokens), 1.0)),
        }
        logit = float(self.bias_logit_square_sum)
        return norms if math.isnan(logit) else {**norms, "logit": math.sqrt(logit)}

    def norm(self, name: ClipBiasNorm) -> float:
        """The norm called ``name``.

        Raises ValueError for an unknown name, or ``logit`` without a ``logit_scale``.
        """
        norms = self.norms()
        if name == "logit" and name not in norms:
            raise ValueError("clip_bias_norm 'logit' needs policy_loss(..., logit_scale=...)")
        check_choice("clip_bias_norm", name, tuple(norms))
        return norms[name]


def loss_stats(
    segments: Segments,
    log_ratio: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    bias: Tensor,
    logit_scale: Tensor | None,
) -> LossStats:
    """The statistics of a micro-batch, for ``policy_loss``.

    (N,) of each loss token: its own log-ratio, the ratio of its segment, its advantage times the correction, and the
    bias c_t, 0 where it is not clipped. ``logit_scale`` is (B, T).
    """
    dtype, lengths = bias.dtype, segments.row_lengths
    logit_square = bias.new_tensor(torch.nan)
    if logit_scale is not None:
        logit_square = segments.row_sums((bias * segments.pick(logit_scale).to(dtype)).square()).sum()
    return LossStats(
        trajectories=(lengths > 0).to(dtype).sum(),
        tokens=lengths.sum().to(dtype),
        clipped=bias.count_nonzero().to(dtype),
        signal=advantage.count_nonzero().to(dtype),
        ratio_sum=ratio.sum(),
        ratio_square_sum=ratio.square().sum(),
        log_ratio_square_sum=torch.dot(log_ratio, log_ratio),
        bias_mean_sum=(segments.row_sums(bias) / lengths.clamp(min=1)).sum(),
        bias_square_sum=segments.row_sums(bias.square()).sum(),
        bias_logit_square_sum=logit_square,
    )


@dataclass(frozen=True)
class Normalization:
    """The factors of one optimizer step."""

    grad_scale: float  # factor on the gradient, before it is clipped
    update_scale: float  # factor on the optimizer's step, that is, on its learning rate
    norm: float  # of the mini-batch's clipping bias
    factor: float  # delta / max(norm, delta)


def normalization(
    stats: LossStats, *, norm: ClipBiasNorm = "token", target: Target = "update", delta: float = 1.0
) -> Normalization:
    """The scales of one optimizer step, with f = delta / max(||C||, delta): 1 up to the threshold, smaller beyond it.

    Target ``gradient`` multiplies the gradient by f, as eq:ST_PPO_mc is written; ``update`` multiplies the learning
    rate, which "adaptively reduces the effective step size". Both are the same for plain SGD. Adam divides by the size
    of the gradient, so it undoes a constant scale.

    Deviation: eq:ST_PPO_mc and eq:GRPO_MC have 1 / max(||C||, delta), which is the same for the paper's delta = 1, and
    for any other delta another learning rate for every step, clipped or not.

    ``stats`` are those of the whole mini-batch, over its micro-batches and ranks. Raises ValueError for an unknown
    choice, or a delta that is not positive.
    """
    check_choice("target", target, get_args(Target))
    if not delta > 0.0:
        raise ValueError(f"delta, the threshold of the clipping bias norm, must be positive, not {delta}")
    size = stats.norm(norm)
    factor = delta / max(size, delta)
    grad_scale, update_scale = (factor, 1.0) if target == "gradient" else (1.0, factor)
    return Normalization(grad_scale, update_scale, size, factor)
