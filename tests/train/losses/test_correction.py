"""Weights that correct for the sampler: by hand, against verl and TRL, and in the loss."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.run_settings import CorrectionConfig
from sorl_train.learner.advantages import correction_settings
from sorl_train.losses.correction import CorrectionSettings, correction_weights
from sorl_train.losses.policy import policy_loss
from sorl_train.report.report import main as report
from sorl_train.run.files import read_jsonl
from sorl_train.run.metrics_log import iter_token_records

from ..conftest import train_short

NAN = math.nan
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]], dtype=torch.bool)
TURNS = torch.tensor([[0, 0, -1, 1, 1, -1], [-1, 0, -1, -1, -1, -1]])
# trainer over sampler: geometric means 6 and .5 of the turns, sqrt(3) of the first sequence; off the mask anything
RATIOS = torch.tensor([[3.0, 12.0, NAN, 0.25, 1.0, 9.0], [NAN, 0.125, 9.0, 9.0, 9.0, 9.0]])
SAMPLER = torch.full((2, 6), -2.5)
OLD = SAMPLER + RATIOS.log()


def weights_of(old: Tensor, **settings: Any) -> tuple[Tensor, list[float]]:
    """The weights, and mean, share of what is cut, share of what is masked, share of what is 0."""
    weights, metrics = correction_weights(old, SAMPLER, MASK, TURNS, CorrectionSettings(**settings))
    names = ("mean", "cut_frac", "mask_frac", "zero_frac")
    assert list(metrics) == [f"loss/correction_{name}" for name in names]
    return weights, list(metrics.values())


ROOT_3 = math.sqrt(3.0)


@pytest.mark.parametrize(
    ("mode", "level", "limits", "expected", "cut", "zero"),
    [
        ("truncate", "token", (0.5, 4.0), [3, 4, 0.25, 1, 0.125], 1 / 5, 0),
        ("truncate", "turn", (0.5, 4.0), [4, 4, 0.5, 0.5, 0.125], 1 / 3, 0),
        ("truncate", "sequence", (0.5, 1.5), [1.5, 1.5, 1.5, 1.5, 0.125], 1 / 2, 0),
        ("band", "token", (0.5, 5.0), [3, 0, 0, 1, 0], 3 / 5, 3 / 5),
        ("band", "turn", (0.4, 5.0), [0, 0, 0.5, 0.5, 0], 2 / 3, 3 / 5),
        ("band", "sequence", (0.5, 5.0), [ROOT_3, ROOT_3, ROOT_3, ROOT_3, 0], 1 / 2, 1 / 5),
    ],
)
def test_weights_by_hand(
    mode: str, level: str, limits: tuple[float, float], expected: list[float], cut: float, zero: float
) -> None:
    weights, figures = weights_of(OLD, mode=mode, level=level, low=limits[0], high=limits[1])
    assert weights[MASK].tolist() == pytest.approx(expected, rel=1e-6)
    assert weights[~MASK].tolist() == [1.0] * 7
    assert figures == pytest.approx([sum(expected) / 5, cut, 0.0, zero], rel=1e-6)


@pytest.mark.parametrize(
    ("bound", "expected", "masked"),
    [(3.0, [1, 1, 1, 1, 1], 0), (1.0, [1, 1, 1, 1, 0], 1 / 2), (0.5, [0, 0, 0, 0, 0], 1)],
)
def test_the_sequence_mask_by_hand(bound: float, expected: list[float], masked: float) -> None:
    """The mean log-ratios are log(9) / 4 = .549 and log(.125) = -2.08: one too high at .5, one too low at 1."""
    weights, figures = weights_of(OLD, sequence_mask=bound)
    assert weights[MASK].tolist() == expected
    assert figures == pytest.approx([sum(expected) / 5, 0.0, masked, 1 - sum(expected) / 5])


def test_both_together_and_their_metrics() -> None:
    weights, figures = weights_of(OLD, mode="truncate", high=4.0, sequence_mask=1.0)
    assert weights[MASK].tolist() == pytest.approx([3, 4, 0.25, 1, 0], rel=1e-6)
    assert figures == pytest.approx([8.25 / 5, 1 / 5, 1 / 2, 1 / 5])


def test_a_sampler_that_agrees_is_left_alone() -> None:
    for mode, level in itertools.product(("truncate", "band"), ("token", "turn", "sequence")):
        weights, figures = weights_of(SAMPLER, mode=mode, level=level, sequence_mask=1e-9)
        assert (weights == 1.0).all() and figures == [1, 0, 0, 0]


def test_mistakes_are_refused() -> None:
    for settings, message in (
        ({"mode": "trunctate"}, "Did you mean 'truncate'"),
        ({"level": "row"}, "token, turn, sequence"),
        ({"low": 1.5}, "1.5 and 5.0 leave no room for a weight of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            CorrectionSettings(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no loss token"):
        correction_weights(SAMPLER, SAMPLER, MASK & False, TURNS, CorrectionSettings())
    with pytest.raises(ValueError, match="rollout_log_probs has shape"):
        correction_weights(SAMPLER, SAMPLER[:1], MASK, TURNS, CorrectionSettings())


# --- as other trainers have it --------------------------------------------------------------------------------


@pytest.mark.verl
def test_weights_and_mask_are_those_of_verl() -> None:
    """TIS and IcePop of a token, and the rejection by the geometric mean."""
    verl = pytest.importorskip(
        "verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed (make test-verl)"
    )
    noise = torch.Generator().manual_seed(3)
    old, sampler = (torch.randn(5, 9, generator=noise) - 2.0 for _ in range(2))
    mask = torch.arange(9) < torch.tensor([6, 7, 8, 9, 6])[:, None]

    def corrected(**settings: Any) -> Tensor:
        turns = torch.zeros_like(mask, dtype=torch.long)
        return correction_weights(old, sampler, mask, turns, CorrectionSettings(**settings))[0] * mask

    for threshold, settings in (
        (2.0, {"mode": "truncate", "high": 2.0}),
        ("0.5_5.0", {"mode": "band", "low": 0.5, "high": 5.0}),
    ):
        theirs, _ = verl.compute_rollout_correction_weights(old - sampler, mask.float(), "token", threshold)
        torch.testing.assert_close(corrected(**settings), theirs)
    bounds = f"{math.exp(-0.3)}_{math.exp(0.3)}"
    kept, _ = verl.compute_rollout_rejection_mask(old - sampler, mask.float(), "seq_mean_k1", bounds)
    ours = corrected(sequence_mask=0.3)
    assert torch.equal(ours, kept * mask) and 0 < ours.sum() < mask.sum()


# --- in the loss ----------------------------------------------------------------------------------------------


def test_a_weight_multiplies_surrogate_and_clipping_bias_by_hand() -> None:
    """Ratios 2, 2, .5 and 1.1 with advantages 1, 1, -1 and 4: all but the last are clipped (at 1.2 and .8)."""
    log_probs = torch.tensor([[2.0, 2.0, 0.5, 1.1]]).log().requires_grad_()
    mask, turns = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.long)
    advantages = torch.tensor([[1.0, 1.0, -1.0, 4.0]])
    weights = torch.tensor([[3.0, 0.0, 0.5, 0.25]], requires_grad=True)
    output = policy_loss(log_probs, torch.zeros(1, 4), advantages, mask, turns, correction=weights)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-(3 * 1.2 + 0 * 1.2 - 0.5 * 0.8 + 0.25 * 1.1 * 4) / 4)
    assert log_probs.grad is not None and weights.grad is None  # a constant in the gradient
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 0.0, 0.0, -0.25 * 1.1 * 4 / 4]]))
    assert float(output.stats.bias_square_sum) == pytest.approx((3 * 2) ** 2 + (0.5 * 0.5) ** 2)
    metrics = output.stats.metrics()
    # a token of weight 0 has no gradient: clipping takes none away, and it does not count as signal
    assert metrics["clip_frac"] == pytest.approx(2 / 4) and metrics["signal_frac"] == pytest.approx(3 / 4)
    assert metrics["ratio_mean"] == pytest.approx(5.6 / 4)


def settings_of(algo: str, **given: Any) -> CorrectionSettings:
    return correction_settings(CorrectionConfig(**given), ALGORITHMS[algo].ratio)


def test_limits_that_are_not_given_are_the_published_ones() -> None:
    found = settings_of("so_grpo", mode="truncate")
    assert (found.level, found.high, found.sequence_mask) == ("token", 2.0, None)
    found = settings_of("so_grpo", mode="band", level="turn")
    assert (found.level, found.low, found.high) == ("turn", 0.5, 5.0)
    assert not CorrectionConfig().is_on and CorrectionConfig(sequence_mask=0.1).is_on


@pytest.mark.parametrize(("algo", "level"), [("so_grpo", "token"), ("so_ppo", "turn"), ("gspo", "sequence")])
def test_the_level_is_by_default_that_of_the_ratio(algo: str, level: str) -> None:
    """A finer one would be undone: a token of weight 0 shares the gradient of its turn or sequence."""
    assert settings_of(algo, mode="band").level == level


@pytest.mark.slow
def test_a_run_in_bfloat16_on_policy_is_corrected(tmp_path: Path) -> None:
    """The cache of the sampler and the trainer's whole rows round differently. A single step on policy computes no old
    log-probabilities by itself: the correction asks for them."""
    settings = {"algo": "so_ppo", "update__mini_batch_size": 16}
    settings |= {"hardware__dtype": "bfloat16", "correction__mode": "band", "correction__level": "turn"}
    settings |= {"correction__low": 0.999, "correction__high": 1.001, "correction__sequence_mask": 0.05}
    run_dir, _ = train_short(tmp_path / "run", **settings)
    for line in read_jsonl(run_dir.metrics)[1:]:
        assert line["rollout/mismatch_mean"] > 1e-4
        assert 0 < line["loss/correction_cut_frac"] < 1 and 0 < line["loss/correction_zero_frac"] < 1
        assert line["loss/correction_mean"] == pytest.approx(1 - line["loss/correction_zero_frac"], abs=2e-3)
        # tokens of weight 0 do not count as signal
        assert line["loss/signal_frac"] <= 1 - line["loss/correction_zero_frac"] + 1e-6
    records = list(iter_token_records(run_dir.trajectories / "step_000001.tokens.jsonl.gz"))
    weights = [weight for record in records for weight in record.weight]
    assert len(weights) == sum(len(record.tokens) for record in records)
    assert {0.0} < set(weights) and all(weight == 0 or 0.998 < weight < 1.002 for weight in weights)
    page = tmp_path / "report.html"
    assert report([str(run_dir.path), "--out", str(page)]) in (0, None)
    assert "Correction for the sampler" in page.read_text()
