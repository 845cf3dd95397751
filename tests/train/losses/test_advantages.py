"""GAE, whitening, group baselines, value loss and KL against loops and arithmetic done by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_train.losses.advantages import gae, group_advantages, whiten
from sorl_train.losses.terms import kl_penalty, value_loss

F64 = torch.float64


def gae_by_loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    advantages = torch.zeros_like(values)
    for b in range(len(mask)):
        following_value = following = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[b, t]:
                delta = rewards[b, t] + gamma * following_value - values[b, t]
                following = delta + gamma * lam * following
                following_value = values[b, t]
                advantages[b, t] = following
    return advantages


def test_gae_steps_over_observations_by_hand() -> None:
    #                     A0   A0   O    O    A1   pad
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]], dtype=torch.bool)
    values = torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.4, 9.0]], dtype=F64)
    rewards = torch.tensor([[0.0, 0.5, 0.0, 0.0, 1.0, 0.0]], dtype=F64)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    last = 1.0 - 0.4
    middle = 0.5 + 0.9 * 0.4 - 0.2 + 0.45 * last  # the next value is that of A1, not of the observation
    first = 0.9 * 0.2 - 0.1 + 0.45 * middle
    assert advantages[0].tolist() == pytest.approx([first, middle, 0, 0, last, 0])
    assert returns[0].tolist() == pytest.approx([first + 0.1, middle + 0.2, 0, 0, 1.0, 0])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("columns", [1, 3, 33])
def test_gae_equals_the_loop(gamma: float, lam: float, columns: int) -> None:
    g = torch.Generator().manual_seed(columns)
    mask = torch.rand(7, columns, generator=g) < 0.6
    mask[3] = False
    values = torch.randn(7, columns, dtype=F64, generator=g).masked_fill(~mask, math.nan)
    rewards = torch.randn(7, columns, dtype=F64, generator=g) * mask
    copies = [x.clone() for x in (rewards, values, mask)]
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected = gae_by_loop(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), atol=1e-12, rtol=0)
    for given, copied in zip((rewards, values, mask), copies, strict=True):
        torch.testing.assert_close(given, copied, atol=0, rtol=0, equal_nan=True)


def test_gae_of_a_long_trajectory_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(2, 4096, generator=g) < 0.7
    values = torch.rand(2, 4096, generator=g)
    rewards = torch.zeros(2, 4096)
    rewards[torch.arange(2), [int(row.nonzero().max()) for row in mask]] = 1.0
    advantages, returns = gae(rewards, values, mask)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(returns[mask], torch.ones(int(mask.sum())), atol=2e-4, rtol=0)
    torch.testing.assert_close(advantages[mask], 1 - values[mask], atol=2e-4, rtol=0)


def test_gae_without_tokens_and_without_gradient() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    advantages, returns = gae(torch.zeros(2, 3), values, torch.zeros(2, 3, dtype=torch.bool))
    assert not advantages.any() and not returns.any()
    advantages, returns = gae(torch.zeros(2, 3), values, torch.ones(2, 3, dtype=torch.bool))
    assert not advantages.requires_grad and not returns.requires_grad
    empty = torch.zeros(2, 0)
    assert gae(empty, empty, empty.bool())[0].shape == (2, 0)


def test_a_reward_off_the_action_tokens_is_an_error() -> None:
    mask = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="a reward lies off the action tokens"):
        gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), mask)


def test_whiten_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    x = torch.tensor([[1.0, 2.0, math.nan], [6.0, 50.0, math.nan]], dtype=F64)
    deviation = math.sqrt((4 + 1 + 9) / 3)
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]], dtype=F64) / deviation
    torch.testing.assert_close(whiten(x, mask, eps=0.0), expected)
    assert not whiten(x, torch.zeros_like(mask)).any()
    assert not whiten(torch.full((1, 2), 0.1), torch.ones(1, 2, dtype=torch.bool)).any()


def groups(rewards: list[float], ids: list[int], included: list[int] | None = None, **options) -> list[float]:
    kept = torch.ones(len(ids), dtype=torch.bool) if included is None else torch.tensor(included).bool()
    return group_advantages(torch.tensor(rewards), torch.tensor(ids), kept, **options).tolist()


def test_group_advantages_by_hand() -> None:
    # group 7: 1, 0, 0, 1 has mean 1/2 and sample variance (4 / 4) / 3; group -2: 3, 1 has mean 2, variance 2
    deviation, other = math.sqrt(1 / 3), math.sqrt(2)
    expected = [0.5 / deviation, 1 / other, -0.5 / deviation, -0.5 / deviation, -1 / other, 0.5 / deviation]
    assert groups([1, 3, 0, 0, 1, 1], [7, -2, 7, 7, -2, 7]) == pytest.approx(expected, abs=1e-5)
    assert groups([1, 3, 0, 0, 1, 1], [7, -2, 7, 7, -2, 7], std=False) == [0.5, 1.0, -0.5, -0.5, -1.0, 0.5]


def test_leave_one_out_by_hand() -> None:
    exact = {"std": False, "baseline": "leave_one_out"}
    # group 4: 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; group 1 is alone; the last one is excluded
    found = groups([1, 5, 0, 2, math.nan], [4, 1, 4, 4, 4], [1, 1, 1, 1, 0], **exact)
    assert found == pytest.approx([0.0, 0.0, -1.5, 1.5, 0.0])
    assert groups([0.1] * 3, [0] * 3, **exact) == [0.0] * 3
    assert groups([3.0, 1.0], [0, 0], **exact) == [2.0, -2.0]


def test_excluded_trajectories_leave_the_baseline_and_get_nothing() -> None:
    with_outage = groups([1, 0, math.nan, 0.5], [1, 1, 1, 1], [1, 1, 0, 1])
    assert with_outage == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)  # mean 1/2, sample deviation 1/2
    assert groups([1, 0, 9], [1, 1, 1], [0, 0, 0]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.3, 1e8])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward: float) -> None:
    for size in (1, 3, 7):
        assert groups([reward] * size + [5.0], [0] * size + [0], [1] * size + [0]) == [0.0] * (size + 1)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_rewards_that_differ_by_rounding_are_equal(baseline: Any) -> None:
    """Sums of the same turn rewards in float32, at other places: a division by their spread would make noise of 1."""
    rewards = torch.tensor([0.4, 0.4, 0.4, 0.1, 0.1, 0.1])
    sums = torch.stack(
        [rewards.sum(), rewards.flip(0).cumsum(0)[-1], torch.tensor(1.49999988), torch.tensor(1.5)]
    )
    assert len(sums.unique()) > 1
    group, included = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    assert not group_advantages(sums, group, included, baseline=baseline).any()
    sums[0] += 1e-4  # a difference that a reward can make
    assert group_advantages(sums, group, included, baseline=baseline).all()


def test_one_included_trajectory_gets_zero() -> None:
    assert groups([1.0, 0.0, 1.0], [0, 0, 1], [1, 0, 1]) == [0.0, 0.0, 0.0]
    assert groups([], []) == []


# --- value loss and KL ---

MASK = torch.tensor([[False, True, True], [True, False, False]])
VALUES = torch.tensor([[math.nan, 1.0, 0.0], [3.0, math.nan, math.nan]], dtype=F64)
RETURNS = torch.tensor([[math.nan, 0.5, 2.0], [2.0, math.nan, math.nan]], dtype=F64)


def test_value_loss_by_hand() -> None:
    values = VALUES.clone().requires_grad_()
    loss = value_loss(values, RETURNS, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * ((0.25 + 4.0) / 2 + 1.0) / 2)
    expected = torch.tensor([[0.0, 0.5 / 4, -2.0 / 4], [1.0 / 2, 0.0, 0.0]], dtype=F64)
    torch.testing.assert_close(values.grad, expected)
    assert torch.equal(values.detach().nan_to_num(7), VALUES.nan_to_num(7))
    by_token = value_loss(VALUES, RETURNS, MASK, aggregation="token_mean", denominator=6)
    assert by_token.item() == pytest.approx(0.5 * 5.25 / 6)


def test_clipped_value_loss_by_hand() -> None:
    old = torch.tensor([[math.nan, 0.0, 0.1], [3.0, math.nan, math.nan]], dtype=F64)
    values = VALUES.clone().requires_grad_()
    loss = value_loss(values, RETURNS, MASK, old_values=old, clip_eps=0.2)
    loss.backward()
    # held values: 0 + 0.2 (error .09 < .25); 0.1 - 0.1 = 0 (the same); 3 (the same)
    assert loss.item() == pytest.approx(0.5 * ((0.25 + 4.0) / 2 + 1.0) / 2)
    pulled = value_loss(values, RETURNS, MASK, old_values=old - 1.0, clip_eps=0.2)
    # held values: -1 + 0.2 (error 1.69 > .25); -0.9 + 0.2 (error 7.29 > 4); 2 + 0.2 (error .04 < 1)
    assert pulled.item() == pytest.approx(0.5 * ((1.69 + 7.29) / 2 + 1.0) / 2)
    with pytest.raises(ValueError, match=r"returns has shape \(2, 1\)"):
        value_loss(VALUES, RETURNS[:, :1], MASK)
    with pytest.raises(ValueError, match="needs old_values"):
        value_loss(VALUES, RETURNS, MASK, clip_eps=0.2)


def test_kl_by_hand() -> None:
    log_probs, ref = torch.tensor([[-1.0, -2.0]], dtype=F64), torch.tensor([[-1.5, -1.0]], dtype=F64)
    assert kl_penalty(log_probs, ref, "k1")[0].tolist() == pytest.approx([0.5, -1.0])
    assert kl_penalty(log_probs, ref, "k2")[0].tolist() == pytest.approx([0.125, 0.5])
    assert kl_penalty(log_probs, ref, "k3")[0].tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])
    old = log_probs - math.log(2.0)  # the tokens are twice as likely as when they were sampled
    twice = kl_penalty(log_probs, ref, "k3_unbiased", old)[0].tolist()
    assert twice == pytest.approx([2 * (math.exp(-0.5) - 0.5), 2 * (math.e - 2)])
    with pytest.raises(ValueError, match="k3_unbiased needs old_log_probs"):
        kl_penalty(log_probs, ref, "k3_unbiased")
    with pytest.raises(ValueError, match="unknown kl kind 'k4'"):
        kl_penalty(log_probs, ref, "k4")


def test_kl_estimates_in_expectation() -> None:
    """k1 and k3 are unbiased; the gradient of k2 is that of the KL, and the gradient of k1 is 0."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, dtype=F64, generator=g).requires_grad_()
    log_p, log_q = torch.log_softmax(logits, 0), torch.log_softmax(torch.randn(6, dtype=F64, generator=g), 0)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum()
    expected = {kind: (p * kl_penalty(log_p, log_q, kind)).sum() for kind in ("k1", "k3")}
    torch.testing.assert_close(expected["k1"], kl)
    torch.testing.assert_close(expected["k3"], kl)
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)

    def sampled_gradient(
        kind: str,
    ) -> Tensor:  # expectation over tokens of the gradient of the estimate
        return torch.autograd.grad(
            (p.detach() * kl_penalty(log_p, log_q, kind)).sum(), logits, retain_graph=True
        )[0]

    torch.testing.assert_close(sampled_gradient("k2"), kl_gradient)
    log_old = torch.log_softmax(torch.randn(6, dtype=F64, generator=g), 0)  # another policy sampled
    moved = (log_old.exp() * kl_penalty(log_p, log_q, "k3_unbiased", log_old)).sum()
    torch.testing.assert_close(moved, kl)
    torch.testing.assert_close(torch.autograd.grad(moved, logits, retain_graph=True)[0], kl_gradient)
    torch.testing.assert_close(sampled_gradient("k1"), torch.zeros_like(kl_gradient), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_unbiased"])
def test_kl_stays_finite(kind: str) -> None:
    log_probs = torch.tensor([[-1e5, 0.0]], requires_grad=True)
    kl = kl_penalty(log_probs, torch.tensor([[0.0, -1e5]]), kind, torch.zeros(1, 2))
    kl.sum().backward()
    assert torch.isfinite(kl).all() and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
