"""Norms of the clipping bias by hand, and what the normalization scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sorl_train.losses.clip_bias import ClipBias, normalization

from .keywords import policy_loss

F64 = torch.float64
# token ratios 2, 1/2 and 3, 1, 1/2 with these advantages clip c = 2, -1/2 of two tokens, and 3, -2 of three
RATIOS = torch.tensor([[2.0, 0.5, 1.0], [3.0, 1.0, 0.5]], dtype=F64)
ADVANTAGES = torch.tensor([[1.0, -1.0, 9.0], [1.0, 1.0, -4.0]], dtype=F64)
MASK = torch.tensor([[True, True, False], [True, True, True]])
SCALE = torch.tensor([[0.5, 1.0, 1.0], [0.1, 1.0, 0.2]], dtype=F64)
NORMS = {
    "scalar": ((2 - 0.5) / 2 + (3 - 2) / 3) / 2,
    "token": math.sqrt(4 + 0.25 + 9 + 4),
    "rms": math.sqrt((4 + 0.25 + 9 + 4) / 5),
    "logit": math.sqrt((2 * 0.5) ** 2 + 0.5**2 + (3 * 0.1) ** 2 + (2 * 0.2) ** 2),
}


def bias(scale: Tensor | None = SCALE) -> ClipBias:
    return policy_loss(
        RATIOS.log(),
        torch.zeros(2, 3, dtype=F64),
        ADVANTAGES,
        MASK,
        torch.zeros(2, 3, dtype=torch.long),
        ratio_level="token",
        logit_scale=scale,
    ).clip_bias


@pytest.mark.parametrize("name", NORMS)
def test_norms_by_hand(name: str) -> None:
    assert bias().norm(name) == pytest.approx(NORMS[name], abs=1e-12)
    assert bias().norms() == pytest.approx(NORMS, abs=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_factor_is_one_up_to_delta_and_falls_with_the_norm(name: str) -> None:
    assert normalization(bias(), norm=name, delta=0.1).factor == pytest.approx(0.1 / NORMS[name])
    assert normalization(bias(), norm=name, delta=100.0).factor == 1.0


@pytest.mark.parametrize("name", NORMS)
def test_factor_is_the_papers_for_its_delta(name: str) -> None:
    assert normalization(bias(), norm=name).factor == pytest.approx(1 / max(NORMS[name], 1.0))


@pytest.mark.parametrize("copies", [1, 4, 16])
def test_what_each_norm_grows_with(copies: int) -> None:
    """The table in clip_bias.py: repeat the trajectories, then the tokens."""
    wide = bias()
    for _ in range(copies - 1):
        wide = wide + bias()
    root = math.sqrt(copies)
    growth = {"scalar": 1.0, "token": root, "rms": 1.0, "logit": root}
    assert wide.norms() == pytest.approx({name: NORMS[name] * growth[name] for name in NORMS})

    long = policy_loss(
        RATIOS.log().repeat(1, copies),
        torch.zeros(2, 3 * copies, dtype=F64),
        ADVANTAGES.repeat(1, copies),
        MASK.repeat(1, copies),
        torch.zeros(2, 3 * copies, dtype=torch.long),
        ratio_level="token",
        logit_scale=SCALE.repeat(1, copies),
    ).clip_bias
    growth = {"scalar": 1.0, "token": root, "rms": 1.0, "logit": root}
    assert long.norms() == pytest.approx({name: NORMS[name] * growth[name] for name in NORMS})


@pytest.mark.parametrize("name", NORMS)
def test_scales_of_both_targets(name: str) -> None:
    delta = 0.4
    f = delta / max(NORMS[name], delta)

    def scales(target: str) -> tuple[float, float, float, float]:
        result = normalization(bias(), norm=name, target=target, delta=delta)
        return result.grad_scale, result.update_scale, result.factor, result.norm

    assert scales("gradient") == pytest.approx((f, 1.0, f, NORMS[name]))
    assert scales("update") == pytest.approx((1.0, f, f, NORMS[name]))


def test_plain_sgd_does_not_tell_the_targets_apart_and_adam_does() -> None:
    def train(target: str, optimizer_class: type[torch.optim.Optimizer]) -> Tensor:
        theta = torch.tensor([0.4, -0.3], dtype=F64, requires_grad=True)
        optimizer = optimizer_class([theta], lr=0.05)
        g = torch.Generator().manual_seed(0)
        for _ in range(4):
            features = torch.randn(3, 8, 2, dtype=F64, generator=g)
            output = policy_loss(
                features @ theta,
                torch.randn(3, 8, dtype=F64, generator=g),
                torch.randn(3, 8, dtype=F64, generator=g),
                torch.ones(3, 8, dtype=torch.bool),
                torch.arange(8).div(3, rounding_mode="floor").expand(3, 8),
                ratio_level="turn",
            )
            optimizer.zero_grad()
            output.loss.backward()
            scales = normalization(output.clip_bias, norm="token", target=target)
            assert theta.grad is not None and scales.factor < 0.9
            theta.grad *= scales.grad_scale
            optimizer.param_groups[0]["lr"] = 0.05 * scales.update_scale
            optimizer.step()
        return theta.detach()

    sgd = train("gradient", torch.optim.SGD), train("update", torch.optim.SGD)
    torch.testing.assert_close(*sgd, atol=1e-12, rtol=0)
    adam = train("gradient", torch.optim.Adam), train("update", torch.optim.Adam)
    assert (adam[0] - adam[1]).abs().max() > 1e-3


def test_clear_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown clip_bias_norm 'tokens'.*Did you mean 'token'\?"):
        normalization(bias(), norm="tokens")
    with pytest.raises(ValueError, match=r"unknown target 'updates'.*Did you mean 'update'\?"):
        normalization(bias(), target="updates")
    with pytest.raises(ValueError, match="must be positive, not -1"):
        normalization(bias(), delta=-1.0)
    without = bias(scale=None)
    assert set(without.norms()) == {"scalar", "token", "rms"}
    with pytest.raises(ValueError, match=r"needs policy_loss\(..., logit_scale=...\)"):
        without.norm("logit")
