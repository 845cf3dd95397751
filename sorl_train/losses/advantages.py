"""Advantages: GAE over action tokens, group baselines, whitening, KL in the reward. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_train.algorithms import GroupBaseline

ROUNDING = 1e-6  # of sums of rewards in float32, as a share of them


def gae(
    rewards: Tensor, values: Tensor, action_mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the policy's tokens, stepping over observations.

    Here t+1 is the trajectory's next action token, in the same turn or in the next one::

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t

    The value after a trajectory's last action token is 0, also when the trajectory was truncated, because the episode
    ends when the agent's budget is used up. With the paper's gamma = lam = 1, A_t is the sum of the rewards from t on,
    minus V_t.

    Args:
        rewards: (B, T), 0 off the action tokens; a turn's reward lies on its last action token.
        values: (B, T), of the critic; read on action tokens only.
        action_mask: (B, T) bool.

    Returns:
        ``(advantages, returns)``, (B, T) each, 0 off the action tokens, without gradient.

    Raises:
        ValueError: a reward lies off the action tokens, where it would be lost.
    """
    if bool((rewards.masked_fill(action_mask, 0.0) != 0).any()):
        raise ValueError("a reward lies off the action tokens; put a turn's reward on its last action token")
    dtype = torch.promote_types(values.dtype, torch.float32)
    rank = action_mask.cumsum(dim=1)  # (B, T): 1 for the row's first action token
    count = int(rank.max()) if rank.numel() else 0
    # column of each action token; the spare one takes the rest
    slots = torch.where(action_mask, rank - 1, count)

    def compact(x: Tensor) -> Tensor:  # (B, T) -> (B, count): action tokens to the left, then zeros
        wide = x.new_zeros((len(x), count + 1), dtype=dtype)
        return wide.scatter_(1, slots, x.detach().to(dtype))[:, :count]

    value = compact(values)
    total = compact(rewards) - value
    total[:, :-1] += gamma * value[:, 1:]
    # A_t = sum_j (gamma lam)^j delta_{t+j}. Each pass doubles the number of terms, so log2(T) passes suffice
    shift, decay = 1, gamma * lam
    while shift < count:
        total[:, :-shift] += decay * total[:, shift:]  # the right-hand side is evaluated before it is added
        shift, decay = 2 * shift, decay * decay
    advantages = torch.cat([total, total.new_zeros((len(total), 1))], dim=1).gather(1, slots)
    returns = torch.where(action_mask, advantages + values.detach(), 0.0)
    return advantages, returns


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """``advantages`` (B, T) with mean 0 and variance 1 (population) over the tokens of ``mask``; 0 off them.

    Many PPO implementations do this; the paper does not mention it. It takes the whole rollout batch at once.
    """
    count = mask.sum().clamp(min=1)
    mean = advantages.masked_fill(~mask, 0.0).sum() / count
    centred = (advantages - mean).masked_fill(~mask, 0.0)
    return centred / (centred.square().sum() / count + eps).sqrt()


def are_equal(lowest: Tensor, highest: Tensor) -> Tensor:
    """Bool: whether all rewards from ``lowest`` to ``highest`` are the same but for rounding.

    A trajectory's reward is a sum over its tokens in float32. Equal rewards of turns that end at other tokens may add
    up to sums that differ in the last bit.
    """
    return highest - lowest <= ROUNDING * highest.abs().clamp(min=1.0)


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    included: Tensor,
    *,
    std: bool = True,
    baseline: GroupBaseline = "mean",
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages, (r_i - mean) / (std + eps) over the group's included trajectories.

    The paper divides by std({r_j}) and does not say which one. This is the sample standard deviation (n - 1), as in the
    public GRPO trainers. ``std=False`` leaves the division out.

    With ``baseline="leave_one_out"`` the mean is that of the other n - 1 members (RLOO, arXiv:2402.14740), so that no
    reward is in its own baseline::

        r_i - sum_{j != i} r_j / (n - 1)  =  n / (n - 1) (r_i - mean)

    Args:
        rewards: (B,), the total reward of each trajectory.
        group_ids: (B,) int, equal for rollouts of the same prompt, in any order.
        included: (B,) bool. Other trajectories do not enter mean and std, and their advantage is 0.

    Returns:
        (B,). All are 0 in a group whose rewards are equal, and in a group with one included trajectory.
    """
    kept = included.nonzero().squeeze(1)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    advantages = torch.zeros(rewards.shape, dtype=dtype, device=rewards.device)
    if not len(kept):
        return advantages
    reward = rewards.detach()[kept].to(dtype)
    groups, index = torch.unique(group_ids[kept], return_inverse=True)

    def reduce(x: Tensor, how: str) -> Tensor:  # over each group, then back to its members
        return x.new_zeros(len(groups)).scatter_reduce_(0, index, x, how, include_self=False)[index]

    centred = reward - reduce(reward, "mean")
    # exactly 0 for equal rewards: they may be off by a rounding error, which a division by eps would blow up
    centred = centred.masked_fill(are_equal(reduce(reward, "amin"), reduce(reward, "amax")), 0.0)
    count = reduce(torch.ones_like(reward), "sum")
    others = (count - 1.0).clamp(min=1.0)
    relative = centred * count / others if baseline == "leave_one_out" else centred
    if std:
        relative = relative / ((reduce(centred.square(), "sum") / others).sqrt() + eps)
    return advantages.index_copy(0, kept, relative)
