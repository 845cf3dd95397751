"""The mean over a mini-batch's loss tokens, as every loss takes it. Pure torch."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import Aggregation, check_choice


def check_shapes(reference: Tensor, **others: Tensor) -> None:
    """Raise ValueError for the first of ``others`` whose shape is not that of ``reference``."""
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
