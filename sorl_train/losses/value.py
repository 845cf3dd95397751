"""The critic's loss. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_train.algorithms import Aggregation
from sorl_train.losses.aggregate import aggregate, check_shapes


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

    Args:
        values: (B, T), with gradient. returns, old_values: (B, T).
        loss_mask: (B, T) bool; what lies off it is never read.
        aggregation, denominator: see ``aggregate``.

    Raises:
        ValueError: shapes differ, or ``clip_eps`` is given without ``old_values``.
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
