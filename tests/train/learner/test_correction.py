"""The correction for the sampler in whole runs of the local engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.run_settings import CorrectionConfig
from sorl_train.learner.advantages import correction_settings
from sorl_train.losses.correction import CorrectionSettings
from sorl_train.report.report import main as report
from sorl_train.run.files import read_jsonl
from sorl_train.run.metrics_log import iter_token_records

from ..conftest import train_short


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
        # the weights of the tokens that lost theirs are no signal
        assert line["loss/signal_frac"] <= 1 - line["loss/correction_zero_frac"] + 1e-6
    records = list(iter_token_records(run_dir.trajectories / "step_000001.tokens.jsonl.gz"))
    weights = [weight for record in records for weight in record.weight]
    assert len(weights) == sum(len(record.tokens) for record in records)
    assert {0.0} < set(weights) and all(weight == 0 or 0.998 < weight < 1.002 for weight in weights)
    page = tmp_path / "report.html"
    assert report([str(run_dir.path), "--out", str(page)]) in (0, None)
    assert "Correction for the sampler" in page.read_text()
