"""Advantages: GAE over action tokens, group baselines, whitening, KL in the reward. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation that steps over observation tokens.

    The next value after a turn's last token is that of the next turn's first token; after the last action token it
    is 0. Returns ``(advantages, returns)``, both (B, T), 0 off the action tokens.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    if bool((rewards.masked_fill(action_mask, 0.0) != 0).any()):
        raise ValueError(
            "a reward lies off the action tokens; put each turn's reward on its last action token"
        )
    slots = action_mask.cumsum(dim=1) - 1  # (B, T): index among the row's action tokens
    count = int(slots.max()) + 1 if slots.numel() else 0
    slots = slots.masked_fill(~action_mask, count)  # one spare column takes everything else

    def compact(x: Tensor) -> Tensor:
        return x.new_zeros((x.shape[0], count + 1), dtype=dtype).scatter_(1, slots, x.to(dtype))[:, :count]

    value = compact(values)
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    compacted = compact(rewards) + gamma * following - value
    # A_t = sum_j (gamma lam)^j delta_{t+j}, by doubling the number of terms summed: log2(T) steps, not T
    shift, decay = 1, gamma * lam
    while shift < count:
        compacted = torch.cat(
            [compacted[:, :-shift] + decay * compacted[:, shift:], compacted[:, -shift:]], dim=1
        )
        shift, decay = 2 * shift, decay * decay
    spare = torch.zeros_like(compacted[:, :1]) if count else compacted.new_zeros((rewards.shape[0], 1))
    advantages = torch.cat([compacted, spare], dim=1).gather(1, slots)
    returns = (advantages + values.to(dtype)).masked_fill(~action_mask, 0.0)
    return advantages, returns


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit (population) standard deviation over the tokens of ``mask``; 0 off them."""
    count = mask.sum().clamp(min=1)
    mean = advantages.masked_fill(~mask, 0.0).sum() / count
    centred = (advantages - mean).masked_fill(~mask, 0.0)
    return centred / (centred.square().sum() / count + eps).sqrt()


def group_advantages(
    rewards: Tensor, group_ids: Tensor, included: Tensor, *, std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages (B,): (r - mean) / (std + eps) over the included trajectories of the group."""
    _, index = torch.unique(group_ids, return_inverse=True)
    size = int(index.max()) + 1 if index.numel() else 0
    kept = included.to(torch.float64)
    r = rewards.to(torch.float64).masked_fill(~included, 0.0)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(size).scatter_add_(0, index, x)

    count = total(kept)
    mean = total(r) / count.clamp(min=1)
    centred = (r - mean[index]) * kept
    spread = r.new_full((size,), -torch.inf).scatter_reduce_(
        0, index, r.masked_fill(~included, -torch.inf), "amax"
    )
    spread = spread - r.new_full((size,), torch.inf).scatter_reduce_(
        0, index, r.masked_fill(~included, torch.inf), "amin"
    )
    advantages = centred
    if std:
        deviation = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt()
        advantages = centred / (deviation + eps)[index]
    advantages = advantages.masked_fill((spread[index] <= 0) | ~included, 0.0)
    return advantages.to(torch.promote_types(rewards.dtype, torch.float32))


def kl_in_reward(rewards: Tensor, kl: Tensor, action_mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards (B, T) less ``kl_coef`` times the per-token KL estimate on the action tokens."""
    return rewards - kl_coef * kl.detach().masked_fill(~action_mask, 0.0)
