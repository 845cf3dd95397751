"""The clipping bias, its norms, and the normalization they trigger. Pure torch.

With ``c_t = 1[clipped] w_t A_t`` on the loss tokens, B trajectories in the mini-batch and ``n = |y|`` loss tokens
in each, the paper's clipping bias is C = E[(1/n) sum_t c_t] (eq:Cturn_def), a signed scalar; its lemma lives in
log-probability space and its figure shows the norm of a gradient. So the norm is a named choice:

==============  ==================================================================================================
``scalar``      abs of the mean over trajectories of (1/n) sum c_t: eq:Cturn_def to the letter; signs cancel
``trajectory``  L2 over trajectories of (1/n) sum c_t
``token``       L2 over all tokens of c_t
``token_mean``  mean over trajectories of the L2 over their tokens
``rms``         root mean square of c_t over all tokens, clipped or not: ``token`` / sqrt(number of tokens)
``logit``       as ``token``, each term times ||d log p(y_t) / d logits||_2 = sqrt(1 - 2 p_y + sum p^2)
``gradient``    L2 norm of the parameter gradient of C; the caller runs that backward and passes the norm
==============  ==================================================================================================

``token`` and its like grow with the square root of the tokens in a mini-batch, so that a threshold means another thing
in every setting; ``rms`` does not grow with anything.
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
    """What the norms of the clipping bias need of a micro-batch, as sums.

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

        ``gradient`` is ``gradient_norm``, which is only needed when something was clipped.
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
    ratio: Tensor,
    bias: Tensor,
    cut: Tensor,
    *,
    logit_scale: Tensor | None,
    trajectory_norm: ClipBiasNorm | None,
    delta: float,
) -> tuple[Tensor, ClipBias]:
    """The clipping bias of a micro-batch, for ``policy_loss``.

    Args:
        ratio: (S,) importance ratio of each segment.
        bias: (S,) sum of c_t over its tokens.
        cut: (N,) abs(A_t) on clipped tokens, 0 elsewhere, so that abs(c_t) is its product with the ratio.
        logit_scale: (B, T).

    Returns:
        The factors f_i (B,) of the trajectory scope, 1 without ``trajectory_norm``; the statistics.
    """
    mean = segments.rows(bias) / segments.row_lengths.clamp(min=1)
    ratio_square = ratio.square()
    square = segments.rows(ratio_square * segments.total(cut.square()))
    logit_square = torch.full_like(square, torch.nan)
    if logit_scale is not None:
        scaled = segments.pick(logit_scale, cut.dtype).mul(cut).square_()
        logit_square = segments.rows(ratio_square * segments.total(scaled))
    present = (segments.row_lengths > 0).to(mean.dtype)
    factors = torch.ones_like(mean)
    if trajectory_norm is not None:
        check_choice("trajectory_norm", trajectory_norm, get_args(ClipBiasNorm))
        check_scope(trajectory_norm, "trajectory")
        check_delta(delta)
        if trajectory_norm == "logit" and logit_scale is None:
            raise ValueError(
                "trajectory_norm 'logit' needs logit_scale; token_log_probs(logit_scale=True) gives it"
            )
        norms = {
            "scalar": mean.abs(),
            "trajectory": mean.abs(),
            "rms": (square / segments.row_lengths.clamp(min=1)).sqrt(),
            "logit": logit_square.sqrt(),
        }
        factors = delta / norms.get(trajectory_norm, square.sqrt()).clamp(min=delta)
    statistics = ClipBias(
        trajectories=present.sum(),
        tokens=segments.row_lengths.sum().to(mean.dtype),
        clipped=(cut > 0).sum().to(mean.dtype),
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
    """What the trainer multiplies: the gradient before clipping, and the optimizer's step (its learning rate).

    ``norm`` is the clipping bias norm of the mini-batch; ``factor`` the (mean) delta / max(norm, delta).
    """

    grad_scale: float
    update_scale: float
    norm: float
    factor: float


def clip_bias_factor(
    clip_bias: ClipBias, norm: ClipBiasNorm, delta: float = 1.0, gradient_norm: float | None = None
) -> float:
    """delta / max(||C||, delta): 1 up to the threshold delta, falling beyond it.

    Deviation from eq:ST_PPO_mc and eq:GRPO_MC, which have 1 / max(||C||, delta): the same for the paper's delta = 1.
    For any other delta the equation also multiplies every step by 1 / delta, clipped or not, which is a learning rate.
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

    The targets are one and the same for plain SGD. Adam divides a constant scale of the gradient out again.

    Args:
        clip_bias: of the whole mini-batch: summed over its micro-batches and ranks.
        norm: of the mini-batch scope. In the trajectory scope the factors are already in the loss, and this is only
            the norm that is reported.
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
    """Raises ValueError for a norm that the scope cannot have."""
    if scope == "trajectory" and norm == "gradient":
        raise ValueError(
            "clip_bias_norm 'gradient' with scope 'trajectory' would take a backward for each trajectory; "
            "use scope 'mini_batch', or norm 'logit', which is exact in logit space"
        )


def check_delta(delta: float) -> None:
    """Raises ValueError unless ``delta``, the norm's lower bound, is positive."""
    if not delta > 0.0:
        raise ValueError(f"delta, the lower bound of the clipping bias norm, must be positive, not {delta}")
