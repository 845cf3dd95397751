"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_train.algorithms import Aggregation
from sorl_train.losses.aggregate import _check_shapes, aggregate
from sorl_train.losses.sums import Sums


@dataclass(frozen=True)
class ValueStats(Sums):
    """Sums over the loss tokens, behind the critic's metrics; ``error`` is return less value."""

    tokens: Tensor
    clipped: Tensor
    value_sum: Tensor
    return_sum: Tensor
    return_square_sum: Tensor
    error_square_sum: Tensor
    error_sum: Tensor

    def metrics(self) -> dict[str, float]:
        """``value_clip_frac``; ``value_mean``; ``explained_variance``, 1 - Var(error) / Var(return), 0 if that is 0."""
        tokens = max(float(self.tokens), 1.0)
        variance = float(self.return_square_sum) / tokens - (float(self.return_sum) / tokens) ** 2
        error = float(self.error_square_sum) / tokens - (float(self.error_sum) / tokens) ** 2
        return {
            "value_clip_frac": float(self.clipped) / tokens,
            "value_mean": float(self.value_sum) / tokens,
            "explained_variance": 1.0 - error / variance if variance > 1e-12 else 0.0,
        }


@dataclass(frozen=True)
class ValueLossOutput:
    """``loss``: scalar, to call backward on. ``stats``: to be summed over micro-batches and ranks."""

    loss: Tensor
    stats: ValueStats


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
    """Half the critic's squared error, (1/2) (V_t - R_t)^2, aggregated as the policy loss is.

    With ``clip_eps``, PPO's pessimistic variant: the larger of that and the error of V_t held within ``clip_eps`` of
    ``old_values``. The paper names no clip range for the critic; None, its default, does not clip.
    """
    _check_shapes(values, returns=returns, loss_mask=loss_mask)
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, returns = (x.to(dtype).masked_fill(~loss_mask, 0.0) for x in (values, returns))
    error = (returns - values).square()
    clipped = torch.zeros((), dtype=dtype, device=values.device)
    if clip_eps is not None:
        if old_values is None:
            raise ValueError(
                "value_loss with clip_eps needs old_values, the critic's values before the update"
            )
        old_values = old_values.to(dtype).masked_fill(~loss_mask, 0.0)
        held = (old_values + (values - old_values).clamp(-clip_eps, clip_eps) - returns).square()
        clipped = (held > error).sum().to(dtype)
        error = torch.maximum(error, held)
    loss = 0.5 * aggregate(error, loss_mask, aggregation=aggregation, denominator=denominator)
    with torch.no_grad():
        gap = returns - values
        sums = (values.sum(), returns.sum(), returns.square().sum(), gap.square().sum(), gap.sum())
        stats = ValueStats(loss_mask.sum().to(dtype), clipped, *(x.detach() for x in sums))
    return ValueLossOutput(loss, stats)
