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
depends on the mini-batch size and on the length of turns. ``rms`` depends on neither. docs/stability.md compares these
norms with others, one of them the norm of the parameter gradient of C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import ClipBiasNorm, Target, check_choice
from sorl_train.losses.segments import Segments
from sorl_train.losses.sums import Sums


@dataclass(frozen=True)
class ClipBias(Sums):
    """Sums over a micro-batch from which the norms of the clipping bias are computed.

    Attributes:
        trajectories: number of trajectories with at least one loss token.
        tokens: number of loss tokens.
        clipped: number of clipped tokens.
        mean_sum: sum over trajectories of (1/n) sum_t c_t.
        square_sum: sum over tokens of c_t^2.
        logit_square_sum: sum over tokens of (c_t logit_scale_t)^2; NaN when no ``logit_scale`` was given.
    """

    trajectories: Tensor
    tokens: Tensor
    clipped: Tensor
    mean_sum: Tensor
    square_sum: Tensor
    logit_square_sum: Tensor

    def norm(self, name: ClipBiasNorm) -> float:
        """The norm ``name`` of the whole mini-batch, once its micro-batches and ranks are summed.

        Raises:
            ValueError: for an unknown name, or ``logit`` without a ``logit_scale``.
        """
        check_choice("clip_bias_norm", name, get_args(ClipBiasNorm))
        norms = self.norms()
        if name not in norms:
            raise ValueError("clip_bias_norm 'logit' needs policy_loss(..., logit_scale=...)")
        return norms[name]

    def norms(self) -> dict[str, float]:
        """Every norm by name; ``logit`` only when ``logit_scale`` was given."""
        norms = {
            "scalar": abs(float(self.mean_sum)) / max(float(self.trajectories), 1.0),
            "token": math.sqrt(float(self.square_sum)),
            "rms": math.sqrt(float(self.square_sum) / max(float(self.tokens), 1.0)),
        }
        logit = float(self.logit_square_sum)
        return norms if math.isnan(logit) else {**norms, "logit": math.sqrt(logit)}


def measure(segments: Segments, bias: Tensor, logit_scale: Tensor | None) -> ClipBias:
    """The clipping bias of a micro-batch, for ``policy_loss``.

    Args:
        bias: (N,) c_t of each loss token, 0 where it is not clipped.
        logit_scale: (B, T) or None.
    """
    lengths = segments.row_lengths.clamp(min=1)
    mean = segments.row_sums(bias) / lengths
    square = segments.row_sums(bias.square())
    logit_square = torch.full_like(square, torch.nan)
    if logit_scale is not None:
        logit_square = segments.row_sums((bias * segments.pick(logit_scale).to(bias.dtype)).square())
    return ClipBias(
        trajectories=(segments.row_lengths > 0).to(mean.dtype).sum(),
        tokens=segments.row_lengths.sum().to(mean.dtype),
        clipped=bias.count_nonzero().to(mean.dtype),
        mean_sum=mean.sum(),
        square_sum=square.sum(),
        logit_square_sum=logit_square.sum(),
    )


@dataclass(frozen=True)
class Normalization:
    """What the trainer multiplies in one optimizer step.

    Attributes:
        grad_scale: factor on the gradient, before it is clipped.
        update_scale: factor on the optimizer's step, that is, on its learning rate.
        norm: norm of the mini-batch's clipping bias.
        factor: delta / max(norm, delta).
    """

    grad_scale: float
    update_scale: float
    norm: float
    factor: float


def normalization(
    clip_bias: ClipBias, *, norm: ClipBiasNorm = "token", target: Target = "update", delta: float = 1.0
) -> Normalization:
    """The scales of one optimizer step, with f = delta / max(||C||, delta): 1 up to the threshold, smaller beyond it.

    Target ``gradient`` multiplies the gradient by f, as eq:ST_PPO_mc is written; ``update`` multiplies the learning
    rate, which "adaptively reduces the effective step size". Both are the same for plain SGD. Adam divides by the size
    of the gradient, so it undoes a constant scale.

    Deviation: eq:ST_PPO_mc and eq:GRPO_MC have 1 / max(||C||, delta), which is the same for the paper's delta = 1. For
    any other delta the equations multiply every step by 1 / delta, whether anything was clipped or not. That would
    only be another learning rate.

    Args:
        clip_bias: of the whole mini-batch: summed over its micro-batches and ranks.

    Raises:
        ValueError: for an unknown choice, or a delta that is not positive.
    """
    check_choice("target", target, get_args(Target))
    if not delta > 0.0:
        raise ValueError(f"delta, the threshold of the clipping bias norm, must be positive, not {delta}")
    size = clip_bias.norm(norm)
    factor = delta / max(size, delta)
    grad_scale, update_scale = (factor, 1.0) if target == "gradient" else (1.0, factor)
    return Normalization(grad_scale, update_scale, size, factor)
