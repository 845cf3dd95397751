"""Weights that correct the policy loss for the gap between sampler and trainer. Pure torch.

The sampler drew a token with its own probability q; the trainer, with the same weights, computes p_old. A loss that
takes the sample for one of p_old has a biased gradient. The importance weight takes the bias away, up to its limits::

    w = exp(mean of log p_old - log q over the token's segment)

    truncate   min(w, high)                          TIS: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl
    band       w if low <= w <= high, otherwise 0    IcePop: arXiv:2510.18855

A segment is a token, a turn or the whole sequence; the product of a few hundred ratios, which other trainers take for a
sequence, leaves any limits. The sequence mask gives weight 0 to a trajectory whose geometric mean lies outside
[exp(-bound), exp(bound)]: the geometric sequence masking of "When Speed Kills Stability" (Liu, Li et al. 2025,
https://richardli.xyz/rl-collapse), ``seq_mean_k1`` in verl. Both are constants to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import CorrectionMode, RatioLevel, check_choice
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.losses.terms import check_shapes


@dataclass(frozen=True)
class CorrectionSettings:
    """Which correction it is."""

    mode: CorrectionMode = "none"  # none: all weights are 1
    level: RatioLevel = "token"  # the tokens that share a weight
    low: float = 0.5  # limits of the weight, around 1; ``truncate`` has only the upper one
    high: float = 5.0
    sequence_mask: float | None = None  # bound on a trajectory's absolute mean log-ratio; None masks none

    def __post_init__(self) -> None:
        check_choice("correction", self.mode, get_args(CorrectionMode))
        check_choice("level of the correction", self.level, get_args(RatioLevel))
        if not 0.0 <= self.low <= 1.0 <= self.high:
            raise ValueError(f"the limits {self.low} and {self.high} leave no room for a weight of 1")


@torch.no_grad()
def correction_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    settings: CorrectionSettings,
) -> tuple[Tensor, dict[str, float]]:
    """The weights (B, T), 1 off the loss tokens, of the type of the log-probabilities, and metrics by name.

    All tensors are (B, T): the log-probabilities of trainer and sampler under the policy that sampled, and mask and
    turn ids as for ``policy_loss``. Means over segments and trajectories run over their loss tokens. ``mean`` is that
    of the loss tokens' weights, ``cut_frac`` the share of the segments (tokens, turns or sequences) whose weight a
    limit truncated or set to 0, ``mask_frac`` the share of the trajectories with loss tokens whose weight the sequence
    mask set to 0, ``zero_frac`` the share of the loss tokens whose weight is 0 in the end. Raises ValueError if shapes
    differ, or if there is no loss token.
    """
    check_shapes(old_log_probs, rollout_log_probs=rollout_log_probs, loss_mask=loss_mask, turn_ids=turn_ids)
    segments = Segments.of(settings.level, loss_mask, turn_ids)
    if not len(segments.positions):
        raise ValueError("there is no loss token to correct")
    gap = segments.pick(old_log_probs).double() - segments.pick(rollout_log_probs).double()  # (N,)
    ratio = importance_ratio(segments.mean(gap if settings.mode != "none" else gap * 0.0))  # (S,)
    weight = _limited(ratio, settings)
    sequences = Segments.of("sequence", loss_mask, turn_ids)
    present = sequences.row_lengths > 0
    kept = torch.ones_like(present)  # (B,)
    if settings.sequence_mask is not None:
        kept = sequences.mean(gap).abs() <= settings.sequence_mask
    by_token = segments.spread(weight) * sequences.spread(kept)  # (N,)
    weights = torch.ones_like(old_log_probs)
    weights.view(-1)[segments.positions] = by_token.to(weights.dtype)
    filled = torch.ones_like(ratio, dtype=torch.bool) if segments.lengths is None else segments.lengths > 0
    return weights, {
        "loss/correction_mean": float(by_token.mean()),
        "loss/correction_cut_frac": float((weight != ratio)[filled].double().mean()),
        "loss/correction_mask_frac": float((~kept)[present].double().mean()),
        "loss/correction_zero_frac": float((by_token == 0).double().mean()),
    }


def _limited(ratio: Tensor, settings: CorrectionSettings) -> Tensor:
    if settings.mode == "band":
        return ratio.masked_fill((ratio < settings.low) | (ratio > settings.high), 0.0)
    return ratio.clamp(max=settings.high)
