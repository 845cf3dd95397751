"""The clipping bias, its norms, and the normalization they trigger. Pure torch.

Take ``c_t = 1[clipped] w_t A_t`` on the loss tokens, B trajectories in the mini-batch and ``n = |y|`` loss tokens in
each. The paper's clipping bias is C = E[(1/n) sum_t c_t] (eq:Cturn_def), a signed scalar, but its lemma is about
gradients in log-probability space and its figure shows the norm of a gradient. It does not say which norm of which
quantity it divides by, so the norm is a choice by name:

==============  ==================================================================================================
``scalar``      abs of the mean over trajectories of (1/n) sum c_t: eq:Cturn_def to the letter; signs cancel
``trajectory``  L2 over trajectories of (1/n) sum c_t
``token``       L2 over all tokens of c_t
``token_mean``  mean over trajectories of the L2 over their tokens
``rms``         root mean square of c_t over all tokens, clipped or not: ``token`` / sqrt(number of tokens)
``logit``       as ``token``, each term times ||d log p(y_t) / d logits||_2 = sqrt(1 - 2 p_y + sum p^2)
``gradient``    L2 norm of the parameter gradient of C; the caller runs that backward and passes the norm
==============  ==================================================================================================

``token`` and norms like it grow with the square root of the number of tokens in a mini-batch, so a threshold for them
depends on the mini-batch size and on the length of turns. ``rms`` depends on neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import ClipBiasNorm, Scope, Target, check_choice
from sorl_train.losses.segments import Segments
from sorl_train.losses.sums import Sums


@dataclass(frozen=True)
class ClipBias(Sums):
    """Sums over a micro-batch from which the norms of the clipping bias are computed.

    Attributes:
        trajectories: number of trajectories with at least one loss token.
        tokens: number of loss tokens.
        clipped: number of clipped tokens.
        mean_sum: sum over trajectories of m_i = (1/n) sum_t c_t.
        mean_square_sum: sum over trajectories of m_i^2.
        square_sum: sum over tokens of c_t^2.
        l2_sum: sum over trajectories of sqrt(sum_t c_t^2).
        logit_square_sum: sum over tokens of (c_t logit_scale_t)^2; NaN when no ``logit_scale`` was given.
        factor_sum: sum over trajectories of the trajectory scope's weights f_i; each is 1 in the other scope.
    """

    trajectories: Tensor
    tokens: Tensor
    clipped: Tensor
    mean_sum: Tensor
    mean_square_sum: Tensor
    square_sum: Tensor
    l2_sum: Tensor
    logit_square_sum: Tensor
    factor_sum: Tensor

    def norm(self, name: ClipBiasNorm, gradient_norm: float | None = None) -> float:
        """The norm ``name`` of the whole mini-batch, once its micro-batches and ranks are summed.

        The norm ``gradient`` is ``gradient_norm`` itself, or 0 when nothing was clipped.

        Raises:
            ValueError: for an unknown name, or one whose figures are missing.
        """
        check_choice("clip_bias_norm", name, get_args(ClipBiasNorm))
        if name == "gradient":
            if float(self.clipped) == 0.0:
                return 0.0
            if gradient_norm is None:
                raise ValueError(
                    "clip_bias_norm 'gradient' needs gradient_norm: the L2 norm of the parameter gradient of "
                    "clip_bias_objective, summed over the mini-batch"
                )
            return float(gradient_norm)
        if name == "logit" and math.isnan(float(self.logit_square_sum)):
            raise ValueError("clip_bias_norm 'logit' needs policy_loss(..., logit_scale=...)")
        return self.norms()[name]

    def norms(self) -> dict[str, float]:
        """Every norm that needs no second backward, by name; ``logit`` only when ``logit_scale`` was given."""
        count = max(float(self.trajectories), 1.0)
        norms = {
            "scalar": abs(float(self.mean_sum)) / count,
            "trajectory": math.sqrt(float(self.mean_square_sum)),
            "token": math.sqrt(float(self.square_sum)),
            "token_mean": float(self.l2_sum) / count,
            "rms": math.sqrt(float(self.square_sum) / max(float(self.tokens), 1.0)),
        }
        logit = float(self.logit_square_sum)
        return norms if math.isnan(logit) else {**norms, "logit": math.sqrt(logit)}


def measure(
    segments: Segments,
    bias: Tensor,
    logit_scale: Tensor | None,
    trajectory_norm: ClipBiasNorm | None,
    delta: float,
) -> tuple[Tensor, ClipBias]:
    """The clipping bias of a micro-batch, for ``policy_loss``.

    Args:
        bias: (N,) c_t of each loss token, 0 where it is not clipped.
        logit_scale: (N,) or None.
        trajectory_norm, delta: see ``LossSettings``.

    Returns:
        The factors f_i (B,) of the trajectory scope, 1 without ``trajectory_norm``; the statistics.

    Raises:
        ValueError: ``trajectory_norm`` is ``logit`` and there is no ``logit_scale``.
    """
    lengths = segments.row_lengths.clamp(min=1)
    mean = segments.row_sums(bias) / lengths
    square = segments.row_sums(bias.square())
    logit_square = torch.full_like(square, torch.nan)
    if logit_scale is not None:
        logit_square = segments.row_sums((bias * logit_scale).square())
    present = (segments.row_lengths > 0).to(mean.dtype)
    factors = torch.ones_like(mean)
    if trajectory_norm is not None:
        if trajectory_norm == "logit" and logit_scale is None:
            raise ValueError(
                "trajectory_norm 'logit' needs logit_scale; token_log_probs(logit_scale=True) gives it"
            )
        norms = {
            "scalar": mean.abs(),
            "trajectory": mean.abs(),
            "rms": (square / lengths).sqrt(),
            "logit": logit_square.sqrt(),
        }
        factors = delta / norms.get(trajectory_norm, square.sqrt()).clamp(min=delta)
    statistics = ClipBias(
        trajectories=present.sum(),
        tokens=segments.row_lengths.sum().to(mean.dtype),
        clipped=bias.count_nonzero().to(mean.dtype),
        mean_sum=mean.sum(),
        mean_square_sum=mean.square().sum(),
        square_sum=square.sum(),
        l2_sum=square.sqrt().sum(),
        logit_square_sum=logit_square.sum(),
        factor_sum=(factors * present).sum(),
    )
    return factors, statistics


@dataclass(frozen=True)
class Normalization:
    """What the trainer multiplies in one optimizer step.

    Attributes:
        grad_scale: factor on the gradient, before it is clipped.
        update_scale: factor on the optimizer's step, that is, on its learning rate.
        norm: norm of the mini-batch's clipping bias.
        factor: delta / max(norm, delta), in the trajectory scope the mean of the trajectories' factors.
    """

    grad_scale: float
    update_scale: float
    norm: float
    factor: float


def clip_bias_factor(
    clip_bias: ClipBias, norm: ClipBiasNorm, delta: float = 1.0, gradient_norm: float | None = None
) -> float:
    """delta / max(||C||, delta): 1 up to the threshold delta, smaller beyond it.

    Deviation: eq:ST_PPO_mc and eq:GRPO_MC have 1 / max(||C||, delta), which is the same for the paper's delta = 1. For
    any other delta the equations multiply every step by 1 / delta, whether anything was clipped or not. That would
    only be another learning rate.
    """
    check_delta(delta)
    return delta / max(clip_bias.norm(norm, gradient_norm), delta)


def normalization(
    clip_bias: ClipBias,
    *,
    norm: ClipBiasNorm = "token",
    scope: Scope = "mini_batch",
    target: Target = "update",
    delta: float = 1.0,
    gradient_norm: float | None = None,
) -> Normalization:
    """The scales of one optimizer step.

    ============  =================  ============  ==============================================================
    scope         target             grad, update
    ============  =================  ============  ==============================================================
    mini_batch    gradient           f, 1          eq:ST_PPO_mc as written
    mini_batch    update             1, f          "adaptively reduces the effective step size"
    trajectory    gradient           1, 1          the loss carries f_i (``policy_loss(trajectory_norm=...)``):
                                                   "reweights each sampled generation according to its clipping bias"
    trajectory    update             1/m, m        m = mean of f_i: relative weights in the gradient, m on the step
    ============  =================  ============  ==============================================================

    Both targets are the same for plain SGD. Adam divides by the size of the gradient, so it undoes a constant scale.

    Args:
        clip_bias: of the whole mini-batch: summed over its micro-batches and ranks.
        norm: the norm of the mini-batch scope. In the trajectory scope the loss contains the factors already, and this
            norm is only reported.
        gradient_norm: for ``norm="gradient"``: L2 norm of the parameter gradient of ``clip_bias_objective``, summed
            over the mini-batch; not needed when nothing was clipped.

    Raises:
        ValueError: for an unknown choice, a norm that the scope cannot have, or a delta that is not positive.
    """
    check_choice("scope", scope, get_args(Scope))
    check_choice("target", target, get_args(Target))
    check_scope(norm, scope)
    factor = clip_bias_factor(clip_bias, norm, delta, gradient_norm)
    if scope == "trajectory":
        count = float(clip_bias.trajectories)
        factor = float(clip_bias.factor_sum) / count if count else 1.0
        grad_scale, update_scale = (1.0, 1.0) if target == "gradient" else (1.0 / factor, factor)
    else:
        grad_scale, update_scale = (factor, 1.0) if target == "gradient" else (1.0, factor)
    return Normalization(grad_scale, update_scale, clip_bias.norm(norm, gradient_norm), factor)


def check_scope(norm: str, scope: str) -> None:
    """Raise ValueError for a norm that the scope cannot have."""
    if scope == "trajectory" and norm == "gradient":
        raise ValueError(
            "clip_bias_norm 'gradient' with scope 'trajectory' would need a backward pass for each trajectory; "
            "use scope 'mini_batch', or norm 'logit', which is exact in logit space"
        )


def check_delta(delta: float) -> None:
    """Raise ValueError unless the threshold ``delta`` is positive."""
    if not delta > 0.0:
        raise ValueError(f"delta, the threshold of the clipping bias norm, must be positive, not {delta}")
