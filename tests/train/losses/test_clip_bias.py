"""Norms of the clipping bias by hand, and what the normalization scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sorl_train.losses.clip_bias import LossStats, normalization

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


def bias(scale: Tensor | None = SCALE) -> LossStats:
    return policy_loss(
        RATIOS.log(),
        torch.zeros(2, 3, dtype=F64),
        ADVANTAGES,
        MASK,
        torch.zeros(2, 3, dtype=torch.long),
        ratio_level="token",
        logit_scale=scale,
    ).stats


def test_norms_by_hand() -> None:
    assert bias().norms() == pytest.approx(NORMS, abs=1e-12)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("delta", [0.4, 1.0, 100.0])
def test_scales_of_both_targets(name: str, delta: float) -> None:
    """Up to the threshold steps are whole; the paper's threshold is 1."""
    f = delta / max(NORMS[name], delta)

    def scales(target: str) -> tuple[float, float, float, float]:
        result = normalization(bias(), norm=name, target=target, delta=delta)
        return result.grad_scale, result.update_scale, result.factor, result.norm

    assert scales("gradient") == pytest.approx((f, 1.0, f, NORMS[name]))
    assert scales("update") == pytest.approx((1.0, f, f, NORMS[name]))


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
