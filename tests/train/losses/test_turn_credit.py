"""Advantages of turns by hand: tables of turns, GAE and groups over turns, MT-GRPO, GiGPO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sorl_train.losses.advantages import (
    TurnGroups,
    first_of_turns,
    group_advantages,
    on_tokens,
    turn_gae,
    turn_sums,
    turn_table,
)

F64 = torch.float64
NO = math.nan
#                     A0  A0  O   A1  O   A2  A2       A0  O   A1  A1  pad
TURNS = torch.tensor([[0, 0, -1, 1, -1, 2, 2], [0, -1, 1, 1, -1, -1, -1]])


def all_in(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def test_tables_of_turns_by_hand() -> None:
    x = torch.tensor([[1, 2, 9, 4, 9, 5, 6], [7, 9, 8, 1, 9, 9, 9]], dtype=F64)
    assert turn_table(TURNS).tolist() == [[True, True, True], [True, True, False]]
    assert turn_sums(x, TURNS).tolist() == [[3, 4, 11], [7, 9, 0]]
    assert first_of_turns(x, TURNS).tolist() == [[1, 4, 5], [7, 8, 0]]
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, NO]])
    assert on_tokens(table, TURNS).tolist() == [[1, 1, 0, 2, 0, 3, 3], [4, 0, 5, 5, 0, 0, 0]]
    none = torch.full((2, 3), -1)
    assert turn_table(none).shape == (2, 0) and turn_sums(torch.ones(2, 3), none).shape == (2, 0)
    assert on_tokens(torch.zeros(2, 0), none).tolist() == [[0.0] * 3] * 2


def test_gae_over_turns_by_hand() -> None:
    values = torch.tensor([[0.1, NO, NO, 0.2, NO, 0.4, NO], [0.5, NO, 0.3, NO, NO, NO, NO]], dtype=F64)
    rewards = torch.zeros(2, 7, dtype=F64)
    rewards[0, 1], rewards[0, 6], rewards[1, 2], rewards[1, 3] = 0.5, 1.0, 0.25, -0.5
    advantages, returns = turn_gae(rewards, values, TURNS, gamma=0.9, lam=0.5)
    third = 1.0 - 0.4
    second = 0.9 * 0.4 - 0.2 + 0.45 * third
    first = 0.5 + 0.9 * 0.2 - 0.1 + 0.45 * second
    assert advantages[0].tolist() == pytest.approx([first, first, 0, second, 0, third, third])
    assert returns[0].tolist() == pytest.approx(
        [first + 0.1, first + 0.1, 0, second + 0.2, 0, third + 0.4, third + 0.4]
    )
    last = -0.25 - 0.3  # both rewards of the turn's tokens
    assert advantages[1].tolist() == pytest.approx([0.9 * 0.3 - 0.5 + 0.45 * last, 0, last, last, 0, 0, 0])


def test_gae_over_turns_has_no_gradient_and_loses_no_reward() -> None:
    values = torch.ones(2, 7, requires_grad=True)
    advantages, returns = turn_gae(torch.zeros(2, 7), values, TURNS)
    assert not advantages.requires_grad and not returns.requires_grad
    with pytest.raises(ValueError, match="a reward lies off the action tokens"):
        turn_gae(torch.ones(2, 7), values, TURNS)


# five rollouts, four of one prompt, of which the last was excluded:
# hit, hit, right   /  hit, miss, wrong   /  miss, right   /  outage      and another prompt: miss, right
REWARDS = torch.tensor([[0.2, 0.2, 1], [0.2, 0, 0], [0, 1, 0], [NO, NO, NO], [0, 1, 0]], dtype=F64)
THERE = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
GROUPS = torch.tensor([5, 5, 5, 5, 2])
INCLUDED = torch.tensor([1, 1, 1, 0, 1], dtype=torch.bool)


def test_returns_of_turns_by_hand() -> None:
    """Returns 1.4, .2, 1 of the first turns, 1.2, 0, 1 of the second, 1 and 0 of the third."""
    found = TurnGroups(REWARDS, THERE, GROUPS, INCLUDED, std=False).by_return()
    first, second = 2.6 / 3, 2.2 / 3
    expected = [
        [1.4 - first, 1.2 - second, 0.5],
        [0.2 - first, 0.0 - second, -0.5],
        [1.0 - first, 1.0 - second, 0],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert found.tolist() == [pytest.approx(row) for row in expected]
    divided = TurnGroups(REWARDS, THERE, GROUPS, INCLUDED).by_return()
    assert divided[:2, 2].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-4)


# Stop or continue, at most three turns: the rewards of the turns, and for each decision whether it was to continue.
STOPS = [([0.6], [False]), ([0.4, 0.5], [True, False]), ([0.4, 0.2, 0.4], [True, True])]


def expected_gradient(estimate: Callable[..., Tensor], q: float, rollouts: int) -> tuple[float, float]:
    """Mean and variance of an estimated derivative of the expected reward by the logit of q, the chance to continue.

    Over all groups of ``rollouts`` rollouts, each with its probability.
    """
    mean = square = 0.0
    for group in itertools.product(STOPS, repeat=rollouts):
        rewards, scores = torch.zeros(2, rollouts, 3, dtype=F64)
        for i, (earned, decisions) in enumerate(group):
            rewards[i, : len(earned)] = torch.tensor(earned, dtype=F64)
            scores[i, : len(decisions)] = torch.tensor([1 - q if go else -q for go in decisions], dtype=F64)
        there = torch.arange(3) < torch.tensor([len(earned) for earned, _ in group])[:, None]
        table = estimate(rewards, there, torch.zeros(rollouts), all_in(rollouts))
        probability = math.prod(q if go else 1 - q for _, decisions in group for go in decisions)
        gradient = float((table * scores).sum()) / rollouts
        mean, square = mean + probability * gradient, square + probability * gradient**2
    return mean, square - mean**2


@pytest.mark.parametrize("q", [0.2, 0.5, 0.8])
def test_when_to_stop_is_learned_from_returns_and_not_from_turns_with_the_same_number(q: float) -> None:
    """Continuing pays: totals are .6, .9 and 1. MT-GRPO compares the outcomes .6, .5 and .4 and says: stop."""
    exact = {"std": False, "baseline": "leave_one_out"}
    second = q * (1 - q) * (0.6 - 0.5)  # of the second decision, where it is reached
    first = q * (1 - q) * (0.4 + q * 0.6 + (1 - q) * 0.5 - 0.6)
    true = first + q * second
    met = 1 - (1 - q) ** 3  # another of the three other rollouts reached the second turn, too
    returns, variance = expected_gradient(lambda *x: TurnGroups(*x, **exact).by_return(), q, 4)
    assert returns == pytest.approx(first + q * met * second) and 0 < returns <= true < 1.05 * returns
    published, _ = expected_gradient(lambda *x: TurnGroups(*x, **exact).by_turn(), q, 4)
    assert published < 0

    def rloo(rewards: Tensor, there: Tensor, *who: Tensor) -> Tensor:
        return group_advantages(rewards.sum(1), *who, **exact)[:, None] * there

    total, of_totals = expected_gradient(rloo, q, 4)
    assert total == pytest.approx(true) and variance < of_totals


def test_state_group_divides_by_the_deviation_and_leaves_out_the_excluded() -> None:
    states = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, -1], [0, 1, 2], [3, 4, -1]])
    found = TurnGroups(REWARDS, THERE, GROUPS, INCLUDED).by_state(states)
    # totals 1.4, .2, 1; the returns of the first turn are the same, those of the second 1.2, 0, 1; third: 1, 0
    totals, seconds = torch.tensor([1.4, 0.2, 1.0]), torch.tensor([1.2, 0.0, 1.0])
    first = (totals - totals.mean()) / totals.std()
    second = (seconds - seconds.mean()) / seconds.std()
    third = math.sqrt(0.5)
    assert found[:3, 0].tolist() == pytest.approx((2 * first).tolist(), abs=1e-4)
    assert found[:3, 1].tolist() == pytest.approx((first + second).tolist(), abs=1e-4)
    assert found[:2, 2].tolist() == pytest.approx(
        [float(first[0]) + third, float(first[1]) - third], abs=1e-4
    )
    assert found[2, 2] == 0 and not found[3:].any()


def test_trajectories_of_one_turn_are_grpo() -> None:
    """For GiGPO times 1 + weight, as published: all rollouts of a prompt start in the same state."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    expected = group_advantages(rewards, groups, all_in(5))
    found = TurnGroups(rewards[:, None], all_in(5)[:, None], groups, all_in(5))
    torch.testing.assert_close(found.by_return()[:, 0], expected)
    torch.testing.assert_close(found.by_turn(weight=0.5)[:, 0], expected)
    by_state = found.by_state(groups[:, None], gamma=0.9, weight=0.5)
    torch.testing.assert_close(by_state[:, 0], 1.5 * expected)
