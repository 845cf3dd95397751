"""Policy, value and KL losses: tensors in, scalar and statistics out. Pure torch.

Shapes: B trajectories, T scored positions (index t scores ``token_ids[t + 1]``). A worked layout::

    token_ids[1:] = [P  P  A0 A0 A0 O  O  A1 A1]
    loss_mask     = [0  0  1  1  1  0  0  1  1 ]
    turn_ids      = [-1 -1 0  0  0  -1 -1 1  1 ]

One function, three switches (``ALGORITHMS``): the ratio's level, the clipping-triggered normalization, the advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sorl_train.clip_bias import ClipBias, ClipBiasNorm, Sums, check_choice, check_scope

RatioLevel = Literal["token", "turn", "sequence"]
Aggregation = Literal["trajectory_mean", "token_mean"]
KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: far from float32's end, far beyond any use


@dataclass(frozen=True)
class Algorithm:
    """The three switches that tell the algorithms apart."""

    ratio: RatioLevel
    normalize: bool
    advantage: Literal["gae", "group"]


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ppo": Algorithm("token", False, "gae"),  # eq:ppo_obj
        "turn_ppo": Algorithm("turn", False, "gae"),  # eq:turn_level_PPO
        "s_ppo": Algorithm("token", True, "gae"),  # the ablation
        "so_ppo": Algorithm("turn", True, "gae"),  # eq:ST_PPO_mc
        "grpo": Algorithm("token", False, "group"),  # eq:GRPO_objective
        "gspo": Algorithm("sequence", False, "group"),  # the paper's baseline
        "so_grpo": Algorithm("token", True, "group"),  # eq:GRPO_MC
    }
)


def get_algorithm(name: str) -> Algorithm:
    """The algorithm ``name``. Raises ValueError with the nearest name for an unknown one."""
    check_choice("algorithm", name, tuple(ALGORITHMS))
    return ALGORITHMS[name]


@dataclass(frozen=True)
class LossStats(Sums):
    """Sums behind the metrics, over the loss tokens. ``log_ratio`` is the token's own, whatever the ratio's level."""

    tokens: Tensor
    clipped: Tensor
    ratio_sum: Tensor
    ratio_square_sum: Tensor
    log_ratio_square_sum: Tensor

    def metrics(self) -> dict[str, float]:
        """``clip_frac``; ``approx_kl``, the estimate mean(log_ratio^2) / 2 (k2); ``ratio_mean`` and ``ratio_std``."""
        tokens = max(float(self.tokens), 1.0)
        mean = float(self.ratio_sum) / tokens
        return {
            "clip_frac": float(self.clipped) / tokens,
            "approx_kl": 0.5 * float(self.log_ratio_square_sum) / tokens,
            "ratio_mean": mean,
            "ratio_std": max(float(self.ratio_square_sum) / tokens - mean**2, 0.0) ** 0.5,
        }


@dataclass(frozen=True)
class LossOutput:
    """What ``policy_loss`` returns.

    Attributes:
        loss: scalar, to call backward on.
        clip_bias: statistics of the clipping bias, detached, to be summed over micro-batches and ranks.
        stats: sums behind the metrics, likewise.
        clip_bias_objective: scalar whose parameter gradient is that of the clipping bias C; None unless asked for,
            and None when this micro-batch clipped nothing.
        ratio: (B, T) detached importance ratio of each token, 1 off the loss tokens.
        clipped: (B, T) bool, the tokens of B^c.
    """

    loss: Tensor
    clip_bias: ClipBias
    stats: LossStats
    clip_bias_objective: Tensor | None
    ratio: Tensor
    clipped: Tensor


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to ``inputs`` is already known in closed form."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output * gradient, None, None


def loss_denominator(loss_mask: Tensor, aggregation: Aggregation = "trajectory_mean") -> float:
    """What this mask (B, T) adds to the denominator: trajectories with a loss token, or loss tokens.

    Summed over the micro-batches and ranks of a mini-batch it is the ``denominator`` argument of the losses.
    """
    check_choice("aggregation", aggregation, get_args(Aggregation))
    counted = loss_mask.any(dim=1) if aggregation == "trajectory_mean" else loss_mask
    return float(counted.sum())


def _row_weights(loss_mask: Tensor, aggregation: Aggregation, denominator: float | None, dtype: torch.dtype) -> Tensor:
    """(B, 1): the weight of each token of a trajectory in the aggregated loss."""
    if denominator is None:
        denominator = loss_denominator(loss_mask, aggregation)
    check_choice("aggregation", aggregation, get_args(Aggregation))
    counts = loss_mask.sum(dim=1, keepdim=True).to(dtype)
    lengths = counts.clamp(min=1.0) if aggregation == "trajectory_mean" else torch.ones_like(counts)
    return 1.0 / (lengths * max(denominator, 1.0))


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    *,
    aggregation: Aggregation = "trajectory_mean",
    denominator: float | None = None,
) -> Tensor:
    """Differentiable mean of ``per_token`` (B, T) over the loss tokens, as the policy loss takes it.

    ``trajectory_mean``: sum over trajectories of (1/|y|) sum_t, divided by ``denominator`` trajectories.
    ``token_mean``: sum over tokens, divided by ``denominator`` tokens. None means this batch alone.
    """
    weights = _row_weights(loss_mask, aggregation, denominator, per_token.dtype)
    return (per_token.masked_fill(~loss_mask, 0.0).sum(dim=1, keepdim=True) * weights).sum()


def _segment_mean(level: RatioLevel, loss_mask: Tensor, turn_ids: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The linear map that replaces each token's value by the mean over its token, turn or sequence.

    It takes (B, T) values that are 0 off the loss tokens and returns (B, T), with arbitrary values off the loss tokens.
    The map is its own adjoint, so that it serves the forward pass and the gradient alike.
    """
    if level == "token":
        return lambda values: values
    if level == "sequence":
        lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1).to(dtype)
        return lambda values: (values.sum(dim=1, keepdim=True) / lengths).expand_as(values)
    ids = turn_ids.masked_fill(~loss_mask, 0).long()
    low, high = (int(v) for v in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if low < 0:
        raise ValueError(f"turn_ids is {low} on a loss token; every loss token needs the id (>= 0) of its turn")
    if high >= ids.shape[1]:  # far-apart ids: number them afresh, so that memory does not grow with the largest
        ids, high = torch.unique(ids, return_inverse=True)[1], ids.shape[1] * ids.shape[0]
        high = int(ids.max())
    shape = (ids.shape[0], high + 1)  # (B, K)
    lengths = torch.zeros(shape, dtype=dtype, device=ids.device).scatter_add_(1, ids, loss_mask.to(dtype)).clamp_(min=1)

    def mean(values: Tensor) -> Tensor:
        sums = torch.zeros(shape, dtype=dtype, device=ids.device).scatter_add_(1, ids, values)
        return (sums / lengths).gather(1, ids)

    return mean


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    *,
    ratio_level: RatioLevel,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    aggregation: Aggregation = "trajectory_mean",
    denominator: float | None = None,
    logit_scale: Tensor | None = None,
    trajectory_norm: ClipBiasNorm | None = None,
    delta: float = 1.0,
    clip_bias_objective: bool = False,
) -> LossOutput:
    """Clipped surrogate loss of PPO, Turn-PPO, GRPO and GSPO, with the statistics of its clipping bias."""
    check_choice("ratio_level", ratio_level, get_args(RatioLevel))
    with torch.no_grad():
        dtype = torch.promote_types(log_probs.dtype, torch.float32)
        ignored = ~loss_mask
        diff = (log_probs.to(dtype) - old_log_probs.to(dtype)).masked_fill_(ignored, 0.0)
        mean = _segment_mean(ratio_level, loss_mask, turn_ids, dtype)
        log_ratio = mean(diff)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill_(ignored, 1.0)
        unclipped = ratio * advantages.to(dtype).masked_fill(ignored, 0.0)
        surrogate = torch.minimum(
            unclipped,
            ratio.clamp(1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high))
            * advantages.to(dtype).masked_fill(ignored, 0.0),
        )
        clipped = surrogate < unclipped
        bias = unclipped.masked_fill(~clipped, 0.0)
        factors, statistics = _clip_bias(bias, clipped, loss_mask, logit_scale, trajectory_norm, delta)
        weights = factors * _row_weights(loss_mask, aggregation, denominator, dtype)
        value = -(surrogate.sum(dim=1, keepdim=True) * weights).sum()
        frozen = clipped | (log_ratio.abs() >= MAX_LOG_RATIO) | ignored
        gradient = mean(unclipped.masked_fill(frozen, 0.0) * -weights).masked_fill(ignored, 0.0)
        tokens = loss_mask.sum().to(dtype)
        padding = ratio.numel() - tokens
        stats = LossStats(
            tokens, statistics.clipped, ratio.sum() - padding, ratio.square().sum() - padding, diff.square().sum()
        )
    loss = _WithGradient.apply(log_probs, value, gradient.to(log_probs.dtype))
    objective = None
    if clip_bias_objective and bool(clipped.any()):
        bias_gradient = mean(bias * weights).masked_fill(ignored, 0.0)
        objective = _WithGradient.apply(
            log_probs, (bias.sum(dim=1, keepdim=True) * weights).sum(), bias_gradient.to(log_probs.dtype)
        )
    return LossOutput(loss, statistics, stats, objective, ratio, clipped)


def _clip_bias(
    bias: Tensor,
    clipped: Tensor,
    loss_mask: Tensor,
    logit_scale: Tensor | None,
    trajectory_norm: ClipBiasNorm | None,
    delta: float,
) -> tuple[Tensor, ClipBias]:
    """Weights f_i (B, 1) of the trajectory scope and the statistics of c_t = ``bias`` (B, T)."""
    present = loss_mask.any(dim=1).to(bias.dtype)
    mean = bias.sum(dim=1) / loss_mask.sum(dim=1).clamp(min=1)
    square = bias.square().sum(dim=1)
    logit_square = torch.full_like(square, torch.nan)
    if logit_scale is not None:
        logit_square = (bias * logit_scale.to(bias.dtype)).masked_fill(~clipped, 0.0).square().sum(dim=1)
    factors = torch.ones_like(present)
    if trajectory_norm is not None:
        check_choice("trajectory_norm", trajectory_norm, get_args(ClipBiasNorm))
        check_scope(trajectory_norm, "trajectory")
        if trajectory_norm == "logit" and logit_scale is None:
            raise ValueError("trajectory_norm 'logit' needs logit_scale")
        norms = {"scalar": mean.abs(), "trajectory": mean.abs(), "logit": logit_square.sqrt()}
        factors = 1.0 / norms.get(trajectory_norm, square.sqrt()).clamp(min=delta)
    statistics = ClipBias(
        trajectories=present.sum(),
        clipped=clipped.sum().to(bias.dtype),
        mean_sum=mean.sum(),
        mean_square_sum=mean.square().sum(),
        square_sum=square.sum(),
        l2_sum=square.sqrt().sum(),
        logit_square_sum=logit_square.sum(),
        factor_sum=(factors * present).sum(),
    )
    return factors.unsqueeze(1), statistics


@dataclass(frozen=True)
class ValueLossOutput:
    """``loss``: scalar; ``clip_frac_sum``: number of tokens whose value was clipped."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip_eps: float | None = None,
    aggregation: Aggregation = "trajectory_mean",
    denominator: float | None = None,
) -> ValueLossOutput:
    """Half the squared error of the critic, optionally clipped around ``old_values`` as in PPO."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    error = (values - returns).square()
    clipped = torch.zeros_like(loss_mask)
    if clip_eps is not None:
        if old_values is None:
            raise ValueError("value_loss with clip_eps needs old_values")
        near = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns).square()
        clipped = (near > error) & loss_mask
        error = torch.maximum(error, near)
    loss = 0.5 * aggregate(error, loss_mask, aggregation=aggregation, denominator=denominator)
    return ValueLossOutput(loss, clipped.sum().detach())


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token (B, T) estimate of KL(policy || reference) from the sampled tokens."""
    check_choice("kl kind", kind, get_args(KLKind))
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    diff = (log_probs.to(dtype) - ref_log_probs.to(dtype)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return diff
    if kind == "k2":
        return 0.5 * diff.square()
    return torch.expm1(-diff) + diff
