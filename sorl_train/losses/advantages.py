"""Advantages: GAE over tokens or turns, comparisons in groups, of turns too (MT-GRPO, GiGPO), whitening. Pure torch.

Where a turn is one step of the agent, all its tokens share an advantage. Tables of turns are (B, K): the k-th turn of
each of B trajectories, of which the longest has K. ``turn_ids`` is (B, T): the turn of each token, -1 off the policy's
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    ``rewards`` (B, T) has a turn's reward on its last action token; ``values`` (B, T) are read on the action tokens of
    the bool ``action_mask`` (B, T). Returns ``(advantages, returns)``, (B, T) each, 0 off the action tokens, without
    gradient. Raises ValueError if a reward lies off the action tokens, where it would be lost.
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
    """Bool, of any shape: whether all rewards from ``lowest`` to ``highest`` are the same but for rounding.

    A trajectory's reward is a sum over its tokens in float32. Equal rewards of turns that end at other tokens may add
    up to sums that differ in the last bit.
    """
    return highest - lowest <= ROUNDING * highest.abs().clamp(min=1.0)


def over_groups(values: Tensor, group: Tensor, how: str) -> Tensor:
    """(N,): each member gets the "mean", "sum", .. of its group, of ``values`` (N,); ``group`` (N,) counts from 0."""
    empty = values.new_zeros(int(group.max()) + 1)
    return empty.scatter_reduce_(0, group, values, how, include_self=False)[group]


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

    ``rewards`` (B,) are total rewards of trajectories, ``group_ids`` (B,) int equal for rollouts of the same prompt.
    Only trajectories ``included`` (B,) bool enter mean and std. Returns (B,), which is 0 for the others, in a group of
    equal rewards, and in a group with one included trajectory.
    """
    kept = included.nonzero().squeeze(1)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    advantages = torch.zeros(rewards.shape, dtype=dtype, device=rewards.device)
    if not len(kept):
        return advantages
    reward = rewards.detach()[kept].to(dtype)
    _, index = torch.unique(group_ids[kept], return_inverse=True)
    centred = reward - over_groups(reward, index, "mean")
    # exactly 0 for equal rewards: they may be off by a rounding error, which a division by eps would blow up
    centred = centred.masked_fill(
        are_equal(over_groups(reward, index, "amin"), over_groups(reward, index, "amax")), 0.0
    )
    count = over_groups(torch.ones_like(reward), index, "sum")
    others = (count - 1.0).clamp(min=1.0)
    relative = centred * count / others if baseline == "leave_one_out" else centred
    if std:
        relative = relative / ((over_groups(centred.square(), index, "sum") / others).sqrt() + eps)
    return advantages.index_copy(0, kept, relative)


def turn_table(turn_ids: Tensor) -> Tensor:
    """Which turns there are: bool (B, K)."""
    count = int(turn_ids.max()) + 1 if turn_ids.numel() else 0
    there = torch.zeros((len(turn_ids), count + 1), dtype=torch.bool, device=turn_ids.device)
    return there.scatter_(1, _slots(turn_ids, count), True)[:, :count]


def turn_sums(values: Tensor, turn_ids: Tensor) -> Tensor:
    """The sum of ``values`` (B, T) over the tokens of each turn: (B, K), at least float32."""
    count = turn_table(turn_ids).shape[1]
    dtype = torch.promote_types(values.dtype, torch.float32)
    sums = torch.zeros((len(values), count + 1), dtype=dtype, device=values.device)
    return sums.scatter_add_(1, _slots(turn_ids, count), values.detach().to(dtype))[:, :count]


def first_of_turns(values: Tensor, turn_ids: Tensor) -> Tensor:
    """``values`` (B, T) at the first token of each turn: (B, K), 0 where there is no such turn."""
    there = turn_table(turn_ids)
    rows, columns = turn_ids.shape
    position = torch.arange(columns, device=turn_ids.device).expand(rows, columns)
    first = torch.full((rows, there.shape[1] + 1), columns, device=turn_ids.device)
    first = first.scatter_reduce_(1, _slots(turn_ids, there.shape[1]), position, "amin")[:, : there.shape[1]]
    return values.detach().gather(1, first.clamp(max=max(0, columns - 1))).masked_fill(~there, 0)


def on_tokens(table: Tensor, turn_ids: Tensor) -> Tensor:
    """A table (B, K) as (B, T): each token gets the value of its turn, other tokens get 0."""
    return torch.cat([table, table.new_zeros((len(table), 1))], dim=1).gather(
        1, _slots(turn_ids, table.shape[1])
    )


def turn_gae(
    rewards: Tensor, values: Tensor, turn_ids: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation in which a turn is one step; all tokens of a turn get its advantage.

    With the reward r_k of turn k and the critic's value V_k at the turn's first token, which is the value of the
    context that the turn answers to::

        delta_k = r_k + gamma V_{k+1} - V_k,    A_k = delta_k + gamma lam A_{k+1},    R_k = A_k + V_k

    The value after the last turn is 0, as in ``gae``. All tokens of turn k get the return R_k, which is what the critic
    learns: nothing is discounted or earned within a turn, so R_k is also a return of the turn's later tokens.

    A turn's reward is the sum of ``rewards`` (B, T) over its tokens; ``values`` (B, T) are read on its first token.
    Returns ``(advantages, returns)``, (B, T) each, 0 off the policy's tokens, without gradient. Raises ValueError if a
    reward lies off these tokens, where it would be lost.
    """
    if bool((rewards.masked_fill(turn_ids >= 0, 0.0) != 0).any()):
        raise ValueError("a reward lies off the action tokens; put a turn's reward on its last action token")
    table = turn_sums(rewards, turn_ids)
    found = gae(table, first_of_turns(values, turn_ids), turn_table(turn_ids), gamma=gamma, lam=lam)
    advantages, returns = (on_tokens(x, turn_ids) for x in found)
    return advantages, returns


@dataclass(frozen=True)
class TurnGroups:
    """The turns of rollouts, whose advantages (B, K) come from comparing them in groups; 0 where there is no turn.

    ``rewards`` (B, K) are those of the turns that are ``there`` (B, K) bool. ``group_ids``, ``included`` (B,), ``std``
    and ``baseline`` are those of ``group_advantages``.
    """

    rewards: Tensor
    there: Tensor
    group_ids: Tensor
    included: Tensor
    std: bool = True
    baseline: GroupBaseline = "mean"

    def by_return(self) -> Tensor:
        """Group advantages (B, K) by turn: what turn k and those after it earn, over the rollouts that reached it::

            A_{i,k} = R_{i,k} - mean_j R_{j,k},     R_{j,k} = sum_{l >= k} r_{j,l}

        What other rollouts earned depends on nothing that rollout i did. So with ``std=False`` the gradient is that of
        the expected reward, when to stop included: with ``baseline="leave_one_out"`` exactly, but for turns that one
        rollout alone reached, which get 0. A mean over n rollouts with i among them gives (n - 1) / n of that.
        """
        return self._over_turns(self._returns(1.0), self._by_number(), self.there)

    def by_turn(self, weight: float = 1.0) -> Tensor:
        """MT-GRPO (arXiv:2505.11821), (B, K): the outcome's group advantage, on earlier turns that of their own, too::

            A_{i,k} = A^O_i + weight A^T_{i,k}   for every turn k but the last,      A_{i,last} = A^O_i

        A^O compares the reward of the last turn, where a task's ``reward`` lies, in the group. A^T compares the reward
        of turn k with those of the k-th turns of the group's other rollouts, last turns left out. The paper has
        rollouts with two turns each; its code weights A^T with 1. Where rollouts choose when to stop, this is not the
        gradient of the expected reward: a reward that every rollout earns that goes on counts for none of them.
        """
        there = self.there
        last = (
            there & ~torch.cat([there[:, 1:], there.new_zeros((len(there), 1))], dim=1)[:, : there.shape[1]]
        )
        outcome = self._over_rollouts(self.rewards.masked_fill(~last, 0.0).sum(dim=1))
        return (outcome + weight * self._over_turns(self.rewards, self._by_number(), there & ~last)) * there

    def by_state(self, state_ids: Tensor, *, gamma: float = 1.0, weight: float = 1.0) -> Tensor:
        """GiGPO (arXiv:2505.10978): the trajectory's group advantage, and that among turns from the same state::

            A_{i,k} = A^E_i + weight A^S_{i,k},     R_{i,k} = sum_{l >= k} gamma^{l - k} r_{i,l}

        A^E compares total rewards in the group, as GRPO does. A^S compares the discounted return R of turn k with those
        of all turns of the group that started in the same state, also of the same trajectory; it is 0 for a state that
        was met once. The paper has gamma = 0.95 and a weight of 1. All rollouts of a prompt start in the same state, so
        a first turn is compared with all others: on trajectories of one turn this is GRPO times 1 + weight.

        ``state_ids`` (B, K) int is equal for turns of one group that started in the same state, and for no others.
        """
        episode = self._over_rollouts(self.rewards.masked_fill(~self.there, 0.0).sum(dim=1))
        return (episode + weight * self._over_turns(self._returns(gamma), state_ids, self.there)) * self.there

    def _returns(self, gamma: float) -> Tensor:
        rewards = self.rewards.masked_fill(~self.there, 0.0)
        return gae(rewards, torch.zeros_like(rewards), self.there, gamma=gamma)[0]

    def _by_number(self) -> Tensor:
        """(B, K): the same number for turns of one group that have the same number in their rollouts."""
        count = self.there.shape[1]
        return self.group_ids[:, None] * count + torch.arange(count, device=self.there.device)

    def _over_rollouts(self, rewards: Tensor) -> Tensor:
        who = (self.group_ids, self.included)
        return group_advantages(rewards, *who, std=self.std, baseline=self.baseline)[:, None]

    def _over_turns(self, values: Tensor, groups: Tensor, taking_part: Tensor) -> Tensor:
        """``group_advantages`` of the turns of included rollouts that take part, all (B, K)."""
        flat = (table.flatten() for table in (values, groups, taking_part & self.included[:, None]))
        return group_advantages(*flat, std=self.std, baseline=self.baseline).reshape(values.shape)


def _slots(turn_ids: Tensor, count: int) -> Tensor:
    """The column of each token in a table of ``count`` turns; the column after the last takes the other tokens."""
    return torch.where(turn_ids >= 0, turn_ids, count)
