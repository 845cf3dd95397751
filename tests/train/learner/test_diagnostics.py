"""Ratio diagnostics against values computed by hand, and against the loss's own count of clipped tokens."""

from __future__ import annotations

import math

import pytest
import torch

from sorl_train.learner.diagnostics import QUANTILES, TURNS, diagnose_ratios, quantiles
from sorl_train.losses.policy import LossSettings, policy_loss

MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
TURN_IDS = torch.tensor([[-1, 0, 0, -1, 1], [0, 0, -1, -1, -1]])
RATIOS = torch.tensor([[9.0, 2.0, 0.5, 9.0, 1.5], [1.0, 4.0, 9.0, 9.0, 9.0]])
ADVANTAGES = torch.tensor([[9.0, 1.0, -1.0, 9.0, -1.0], [1.0, 1.0, 9.0, 9.0, 9.0]])


CLASSES = torch.tensor([[-1, 0, 1, -1, 0], [2, 0, -1, -1, -1]], dtype=torch.int8)


def diagnose(level: str = "token") -> dict[str, float]:
    found = diagnose_ratios(
        RATIOS.log(),
        torch.zeros_like(RATIOS),
        ADVANTAGES,
        MASK,
        TURN_IDS,
        CLASSES,
        settings=LossSettings(level),  # type: ignore[arg-type]
    )
    return found.metrics()


def test_effective_sample_sizes_by_hand() -> None:
    found = diagnose()
    token = [2.0, 0.5, 1.5, 1.0, 4.0]
    assert found["ess_token"] == pytest.approx(sum(token) ** 2 / (5 * sum(w * w for w in token)))
    turn = [1.0, 1.5, 2.0]  # geometric means of (2, .5), (1.5), (1, 4)
    assert found["ess_turn"] == pytest.approx(sum(turn) ** 2 / (3 * sum(w * w for w in turn)))
    sequence = [1.5 ** (1 / 3), 2.0]
    assert found["ess_sequence"] == pytest.approx(sum(sequence) ** 2 / (2 * sum(w * w for w in sequence)))


def test_quantiles_of_log_ratios_at_three_levels_by_hand() -> None:
    found = diagnose()
    assert found["log_ratio_p50"] == pytest.approx(math.log(1.5))
    assert found["log_ratio_p50_turn"] == pytest.approx(math.log(1.5))  # of log 1, log 1.5, log 2
    low, high = math.log(1.5) / 3, math.log(2.0)  # the two sequences
    assert found["log_ratio_p50_sequence"] == pytest.approx((low + high) / 2)
    assert found["log_ratio_p01_sequence"] == pytest.approx(low + 0.01 * (high - low))
    assert found["log_ratio_p99_sequence"] == pytest.approx(low + 0.99 * (high - low))


@pytest.mark.parametrize("count", [1, 2, 99, 1000])
def test_quantiles_are_those_of_torch(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    shares = torch.tensor(QUANTILES, dtype=torch.float64)
    assert quantiles(values, QUANTILES) == torch.quantile(values.double(), shares).tolist()
    assert quantiles(values[:0], QUANTILES) == []


@pytest.mark.slow
def test_quantiles_of_more_values_than_torch_takes() -> None:
    values = torch.arange(2**24 + 1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    assert quantiles(values, [0.5]) == [2.0**23]


def test_clipped_tokens_by_turn_by_hand() -> None:
    found = diagnose()
    # turn 0: 2.0 and 4.0 with A > 0 and 0.5 with A < 0 are clipped, 1.0 is not; turn 1: 1.5 with A < 0 is not
    assert found["clip_frac_turn0"] == pytest.approx(3 / 4) and found["clip_frac_turn1"] == 0.0
    assert "clip_frac_turn2" not in found


def test_clipped_tokens_by_class_by_hand() -> None:
    found = diagnose()
    # tags: 2.0 (A > 0) and 4.0 (A > 0) are clipped, 1.5 (A < 0) is not; reasoning: 0.5 (A < 0) is; query: 1.0 is not
    assert found["clip_frac_tag"] == pytest.approx(2 / 3)
    assert found["clip_frac_reasoning"] == 1.0 and found["clip_frac_query"] == 0.0
    assert "clip_frac_answer" not in found
    assert [found[f"token_share_{name}"] for name in ("tag", "reasoning", "query")] == [0.6, 0.2, 0.2]


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_clipped_tokens_are_those_of_the_loss(level: str) -> None:
    noise = torch.Generator().manual_seed(0)
    mask = torch.rand((16, 40), generator=noise) < 0.6
    turn_ids = torch.where(mask, torch.arange(40) // 4, -1)
    log_probs, old, advantages = (torch.randn((16, 40), generator=noise) * 0.3 for _ in range(3))
    settings = LossSettings(level)  # type: ignore[arg-type]
    stats = policy_loss(log_probs, old, advantages, mask, turn_ids, settings).stats
    found = diagnose_ratios(log_probs, old, advantages, mask, turn_ids, settings=settings)
    assert float(found.by_turn[:, 1].sum()) == float(stats.clipped)
    assert float(found.by_turn[:, 0].sum()) == float(mask.sum())
    assert found.by_turn[TURNS - 1, 0] == (turn_ids >= TURNS - 1).sum()  # turns 7, 8 and 9


def test_on_policy_and_empty() -> None:
    zeros = torch.zeros(2, 5)
    turn = LossSettings("turn")
    on_policy = diagnose_ratios(zeros, zeros, zeros, MASK, TURN_IDS, settings=turn).metrics()
    assert on_policy["ess_token"] == on_policy["ess_turn"] == on_policy["ess_sequence"] == 1.0
    nothing = diagnose_ratios(zeros, zeros, zeros, ~MASK & False, TURN_IDS, settings=turn)
    assert nothing.metrics()["ess_token"] == 1.0
    assert not any(name.startswith("log_ratio") for name in nothing.metrics())  # there is none
