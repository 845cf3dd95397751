"""What every loss shares, the mean over a mini-batch, and the terms beside the policy's: KL and critic. Pure torch."""

from __future__ import annotations

from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_train.algorithms import Aggregation, KLKind, check_choice
from sorl_train.losses.segments import MAX_LOG_RATIO, importance_ratio


def check_shapes(reference: Tensor, **others: Tensor) -> None:
    """Raise ValueError for the first of ``others`` that has not the same shape as ``reference``."""
    for name, tensor in others.items():
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the first input {tuple(reference.shape)}"
            )


def loss_denominator(loss_mask: Tensor, aggregation: Aggregation = "trajectory_mean") -> float:
    """What a mask (B, T) adds to the denominator: its trajectories with a loss token, or its loss tokens.

    The sum over all micro-batches and ranks of a mini-batch is the ``denominator`` argument of every loss here.
    """
    check_choice("aggregation", aggregation, get_args(Aggregation))
    counted = loss_mask.any(dim=1) if aggregation == "trajectory_mean" else loss_mask
    return float(counted.sum())


def row_weights(
    lengths: Tensor, aggregation: Aggregation, denominator: float | None, dtype: torch.dtype
) -> Tensor:
    """(B,): the weight that each loss token of a trajectory has in the mean; ``lengths`` (B,) is |y|."""
    check_choice("aggregation", aggregation, get_args(Aggregation))
    if denominator is None:
        counted = lengths.count_nonzero() if aggregation == "trajectory_mean" else lengths.sum()
        denominator = float(counted)
    elif denominator < 0:
        raise ValueError(f"denominator must not be negative, not {denominator}")
    per_row = lengths.clamp(min=1) if aggregation == "trajectory_mean" else torch.ones_like(lengths)
    # a denominator of 0 means that there are no tokens; 1 keeps the weights finite
    return (per_row.to(dtype) * (denominator or 1.0)).reciprocal()


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    *,
    aggregation: Aggregation = "trajectory_mean",
    denominator: float | None = None,
) -> Tensor:
    """Differentiable mean of ``per_token`` (B, T) over the loss tokens, as the policy loss takes it.

    ``trajectory_mean``: (1/denominator) sum over trajectories of (1/|y|) sum over tokens, as the paper writes it.
    ``token_mean``: (1/denominator) sum over tokens.
    None as ``denominator`` is this batch's own, ``loss_denominator(loss_mask, aggregation)``.
    """
    check_shapes(per_token, loss_mask=loss_mask)
    weights = row_weights(loss_mask.sum(dim=1), aggregation, denominator, per_token.dtype)
    return (per_token.masked_fill(~loss_mask, 0.0).sum(dim=1) * weights).sum()


def sum_over_ranks(*values: float) -> tuple[float, ...]:
    """Each value summed over all ranks, or the values where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return tuple(packed.tolist())


def kl_penalty(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind = "k2", old_log_probs: Tensor | None = None
) -> Tensor:
    """Per-token (B, T) estimate of KL(policy || reference) from tokens that the policy of ``old_log_probs`` sampled.

    With d = log pi - log pi_ref, clamped to +-20: ``k1`` = d, unbiased, the one for a penalty in the reward;
    ``k2`` = d^2 / 2, whose gradient is that of the KL; ``k3`` = exp(-d) - 1 + d, unbiased and never negative.
    As a term of the loss, ``k1`` has a gradient of 0 in expectation, so it has no effect. The gradient of ``k2`` is d
    and that of ``k3`` is 1 - exp(-d). At d = -19, a token that has become very unlikely, these are -19 and -1.8e8.
    ``k3_unbiased`` is ``k3`` times the importance ratio p / p_old (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): its
    value and its gradient are in expectation those of the KL after the policy has moved, too. It alone needs
    ``old_log_probs``.
    """
    check_choice("kl kind", kind, get_args(KLKind))
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    diff = (log_probs.to(dtype) - ref_log_probs.to(dtype)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return diff
    if kind == "k2":
        return 0.5 * diff.square()
    k3 = torch.expm1(-diff) + diff
    if kind == "k3":
        return k3
    if old_log_probs is None:
        raise ValueError("kl_penalty with k3_unbiased needs old_log_probs, those of the policy that sampled")
    return importance_ratio(log_probs.to(dtype) - old_log_probs.to(dtype)) * k3


def value_loss(
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip_eps: float | None = None,
    aggregation: Aggregation = "trajectory_mean",
    denominator: float | None = None,
) -> Tensor:
    """Half the critic's squared error, (1/2) (V_t - R_t)^2, as a scalar aggregated as the policy loss is.

    With ``clip_eps`` it is PPO's pessimistic variant: of that error and the error of V_t held within ``clip_eps`` of
    ``old_values``, the larger one counts. The paper names no clip range for the critic, so the default is None.

    All tensors are (B, T); what lies off the bool ``loss_mask`` is never read. ``aggregation`` and ``denominator`` are
    those of ``aggregate``. Raises ValueError if shapes differ, or for ``clip_eps`` without ``old_values``.
    """
    check_shapes(values, returns=returns, loss_mask=loss_mask)
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, returns = (x.to(dtype).masked_fill(~loss_mask, 0.0) for x in (values, returns))
    error = (returns - values).square()
    if clip_eps is not None:
        if old_values is None:
            raise ValueError(
                "value_loss with clip_eps needs old_values, the critic's values before the update"
            )
        old_values = old_values.to(dtype).masked_fill(~loss_mask, 0.0)
        held = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
        error = torch.maximum(error, (held - returns).square())
    return 0.5 * aggregate(error, loss_mask, aggregation=aggregation, denominator=denominator)
