"""Advantages of single turns: GAE over turns, group advantages of turns, MT-GRPO and GiGPO. Pure torch.

A turn is one step of the agent here, so all its tokens share an advantage. Tables of turns are (B, K): the k-th turn of
each of B trajectories, of which the longest has K. ``turn_ids`` is (B, T): the turn of each token, -1 off the policy's
tokens. The comparisons of turns take the tables ``turn_rewards`` and ``turns`` (bool: the turns that there are), and
``group_ids``, ``included`` (B,), ``std`` and ``baseline`` as ``group_advantages`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_train.algorithms import GroupBaseline
from sorl_train.losses.advantages import gae, group_advantages


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

    Args:
        rewards: (B, T), a turn's reward is their sum over its tokens; 0 off the policy's tokens.
        values: (B, T), of the critic; read on the first token of each turn.

    Returns:
        ``(advantages, returns)``, (B, T) each, 0 off the policy's tokens, without gradient.

    Raises:
        ValueError: a reward lies off the policy's tokens, where it would be lost.
    """
    if bool((rewards.masked_fill(turn_ids >= 0, 0.0) != 0).any()):
        raise ValueError("a reward lies off the action tokens; put a turn's reward on its last action token")
    table = turn_sums(rewards, turn_ids)
    found = gae(table, first_of_turns(values, turn_ids), turn_table(turn_ids), gamma=gamma, lam=lam)
    advantages, returns = (on_tokens(x, turn_ids) for x in found)
    return advantages, returns


def return_group_advantages(
    turn_rewards: Tensor,
    turns: Tensor,
    group_ids: Tensor,
    included: Tensor,
    *,
    std: bool = True,
    baseline: GroupBaseline = "mean",
) -> Tensor:
    """Group advantages turn by turn: what turn k and those after it earn, compared over the rollouts that reached it::

        A_{i,k} = R_{i,k} - mean_j R_{j,k},     R_{j,k} = sum_{l >= k} r_{j,l}

    What other rollouts earned depends on nothing that rollout i did. So with ``std=False`` the gradient is that of the
    expected reward, when to stop included: with ``baseline="leave_one_out"`` exactly, but for turns that one rollout
    alone reached, which get 0. A mean over n rollouts with i among them gives (n - 1) / n of that.

    See the module's docstring for the arguments. Returns (B, K), 0 where there is no turn.
    """
    rewards = turn_rewards.masked_fill(~turns, 0.0)
    returns, _ = gae(rewards, torch.zeros_like(rewards), turns)
    there = turns & included[:, None]
    return _over_table(returns, _by_number(group_ids, turns), there, std, baseline) * turns


def turn_group_advantages(
    turn_rewards: Tensor,
    turns: Tensor,
    group_ids: Tensor,
    included: Tensor,
    *,
    weight: float = 1.0,
    std: bool = True,
    baseline: GroupBaseline = "mean",
) -> Tensor:
    """MT-GRPO (arXiv:2505.11821): the outcome's group advantage, and on earlier turns that of the turn's own reward::

        A_{i,k} = A^O_i + weight A^T_{i,k}   for every turn k but the last,      A_{i,last} = A^O_i

    A^O compares the reward of the last turn, where a task's ``reward`` lies, in the group. A^T compares the reward of
    turn k with those of the k-th turns of the group's other rollouts, last turns left out. The paper has rollouts with
    two turns each; its code weights A^T with 1. Where rollouts choose when to stop, this is not the gradient of the
    expected reward: what all earned who went on counts for none of them.

    See the module's docstring for the arguments. Returns (B, K), 0 where there is no turn.
    """
    last = turns & ~torch.cat([turns[:, 1:], turns.new_zeros((len(turns), 1))], dim=1)[:, : turns.shape[1]]
    outcome = turn_rewards.masked_fill(~last, 0.0).sum(dim=1)
    of_outcome = group_advantages(outcome, group_ids, included, std=std, baseline=baseline)
    early = turns & ~last & included[:, None]
    of_turns = _over_table(turn_rewards, _by_number(group_ids, turns), early, std, baseline)
    return (of_outcome[:, None] + weight * of_turns) * turns


def state_group_advantages(
    turn_rewards: Tensor,
    turns: Tensor,
    state_ids: Tensor,
    group_ids: Tensor,
    included: Tensor,
    *,
    gamma: float = 1.0,
    weight: float = 1.0,
    std: bool = True,
    baseline: GroupBaseline = "mean",
) -> Tensor:
    """GiGPO (arXiv:2505.10978): the trajectory's group advantage, and that among turns from the same state::

        A_{i,k} = A^E_i + weight A^S_{i,k},     R_{i,k} = sum_{l >= k} gamma^{l - k} r_{i,l}

    A^E compares total rewards in the group, as GRPO does. A^S compares the discounted return R of turn k with those of
    all turns of the group that started in the same state, also of the same trajectory; it is 0 for a state that was
    met once. The paper has gamma = 0.95 and a weight of 1. All rollouts of a prompt start in the same state, so a first
    turn is compared with all others: on trajectories of one turn this is GRPO times 1 + weight.

    ``state_ids`` (B, K) int is equal for turns of one group that started in the same state, and for no others. See the
    module's docstring for the other arguments. Returns (B, K), 0 where there is no turn.
    """
    rewards = turn_rewards.masked_fill(~turns, 0.0)
    of_episode = group_advantages(rewards.sum(dim=1), group_ids, included, std=std, baseline=baseline)
    returns, _ = gae(rewards, torch.zeros_like(rewards), turns, gamma=gamma, lam=1.0)
    of_states = _over_table(returns, state_ids, turns & included[:, None], std, baseline)
    return (of_episode[:, None] + weight * of_states) * turns


def _by_number(group_ids: Tensor, turns: Tensor) -> Tensor:
    """(B, K): the same number for turns of one group that have the same number in their rollouts."""
    return group_ids[:, None] * turns.shape[1] + torch.arange(turns.shape[1], device=turns.device)


def _over_table(
    values: Tensor, groups: Tensor, taking_part: Tensor, std: bool, baseline: GroupBaseline
) -> Tensor:
    """``group_advantages`` of the turns in a table (B, K)."""
    flat = (table.flatten() for table in (values, groups, taking_part))
    return group_advantages(*flat, std=std, baseline=baseline).reshape(values.shape)


def _slots(turn_ids: Tensor, count: int) -> Tensor:
    """The column of each token in a table of ``count`` turns; the column after the last takes the other tokens."""
    return torch.where(turn_ids >= 0, turn_ids, count)
