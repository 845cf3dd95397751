"""Value loss and KL estimates against arithmetic done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sorl_train.losses.terms import kl_penalty, value_loss

F64 = torch.float64
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
    ) -> torch.Tensor:  # expectation over tokens of the gradient of the estimate
        return torch.autograd.grad(
            (p.detach() * kl_penalty(log_p, log_q, kind)).sum(), logits, retain_graph=True
        )[0]

    torch.testing.assert_close(sampled_gradient("k2"), kl_gradient)
    torch.testing.assert_close(sampled_gradient("k1"), torch.zeros_like(kl_gradient), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_stays_finite(kind: str) -> None:
    log_probs = torch.tensor([[-1e5, 0.0]], requires_grad=True)
    kl = kl_penalty(log_probs, torch.tensor([[0.0, -1e5]]), kind)
    kl.sum().backward()
    assert torch.isfinite(kl).all() and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
