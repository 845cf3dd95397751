"""What an algorithm from outside reaches in the update, and terms of the loss that no algorithm of the table has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_train.algorithms import Algorithm
from sorl_train.config.find_algorithm import algorithm_facts, find_algorithm
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy
from sorl_train.plugins.objective import Objective
from sorl_train.run.files import read_jsonl

from .conftest import short_config, train_short, weights_of
from .learner.test_trust_region import batch as batch  # a fixture

BACK_ALONE = """
from sorl_train.algorithms import Algorithm
from sorl_train.learner.trust_region import TrustRegion

class BackAlone(TrustRegion):
    def go_back(self, kl):
        scale = self.scale
        super().go_back(kl)
        self.scale = scale

ALGORITHM = Algorithm("token", "group", trust=BackAlone, defaults={"update.trust_kl": 0.01})
"""


def one_step(
    folder: str, batch: Batch, monkeypatch: pytest.MonkeyPatch, **hooks: Callable[..., Any]
) -> tuple[Tensor, dict[str, float]]:
    """How far one step of plain SGD moves the weights, in two micro-batches, and its metrics."""
    row = dataclasses.replace(find_algorithm("ppo"), **hooks)
    monkeypatch.setattr("sorl_train.config.settings.find_algorithm", lambda *_: row)
    settings = short_config(**{"update.micro_batch_size": 5, "optim.max_grad_norm": None, "algo": "ppo"})
    model, means = load_policy(folder), Means()
    before = weights_of(model)
    PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters())), settings).step(batch, 0.1, means)
    return weights_of(model) - before, means.result()


def test_hooks_reach_the_step(tiny_folder: str, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, figures = one_step(tiny_folder, batch, monkeypatch)
    assert float(plain.abs().max()) > 1e-4
    half, _ = one_step(tiny_folder, batch, monkeypatch, weight=lambda p, *_: torch.full_like(p, 0.5))
    torch.testing.assert_close(half, plain / 2, atol=5e-7, rtol=1e-3)
    shorter, found = one_step(tiny_folder, batch, monkeypatch, step_scale=lambda *_: 0.25)
    torch.testing.assert_close(shorter, plain / 4, atol=5e-7, rtol=1e-3)
    assert found["loss/effective_lr"] == 0.25 * figures["loss/effective_lr"] == 0.25 * found["loss/lr"]

    def nothing_counts(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        assert log_probs.shape == old.shape == advantages.shape == mask.shape
        return torch.zeros_like(log_probs)

    nothing, found = one_step(tiny_folder, batch, monkeypatch, weight=nothing_counts)
    assert not nothing.any() and found["loss/signal_frac"] == 0.0


def test_the_unbiased_kl_is_weighed_by_the_ratio(tiny_folder: str, batch: Batch) -> None:
    """Each token twice as likely as when it was sampled: the estimate is twice that of k3."""
    assert batch.old_log_probs is not None
    moved = batch.with_fields(
        old_log_probs=batch.old_log_probs - math.log(2.0), ref_log_probs=batch.old_log_probs - 0.5
    )
    found = {}
    for kind in ("k3", "k3_unbiased"):
        settings = short_config(algo="ppo", **{"loss.kl_coef": 0.1, "loss.kl_type": kind})
        model, means = load_policy(tiny_folder), Means()
        PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters())), settings).step(
            moved, 0.1, means
        )
        found[kind] = means.result()["loss/ref_kl"]
    assert found["k3"] == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-4)
    assert found["k3_unbiased"] == pytest.approx(2 * found["k3"], rel=1e-4)


def test_entropy_is_rewarded_below_its_target_alone(tiny_folder: str, batch: Batch) -> None:
    """The sampler's log-probabilities are all -.5, so the entropy is .5: a target of .4 is the same as no bonus."""
    sampled = batch.with_fields(rollout_log_probs=torch.full_like(batch.rollout_log_probs, -0.5))
    found = []
    for target, coef in ((None, 0.0), (0.4, 1.0), (0.6, 1.0), (None, 1.0)):
        settings = short_config(algo="ppo", **{"loss.entropy_coef": coef, "loss.entropy_target": target})
        model, means = load_policy(tiny_folder), Means()
        PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters())), settings).step(
            sampled, 0.1, means
        )
        found.append((weights_of(model), means.result()["loss/policy"]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[2][0], found[3][0])
    assert found[0][1] == found[1][1] > found[2][1] == found[3][1]


def test_a_trust_region_from_outside_is_trained_and_resumed(tmp_path: Path) -> None:
    """A rate that leaves the region at once: the weights go back, the rate stays, and a resumed run goes on alike."""
    file = tmp_path / "back_alone.py"
    file.write_text(BACK_ALONE)
    algo = str(file)
    assert algorithm_facts(algo)["trust"] == "BackAlone"
    shared = {"optim__lr": 0.1, "optim__warmup_ratio": 0.0, "optim__schedule": "constant"}
    whole, _ = train_short(tmp_path / "whole", algo=algo, update__steps=3, **shared)
    lines = list(read_jsonl(whole.metrics))[1:]
    assert any(line["loss/trust_moves_back"] for line in lines)
    assert all(line["loss/trust_scale"] == 1.0 for line in lines)
    parts, _ = train_short(tmp_path / "parts", algo=algo, update__steps=2, **shared)
    train_short(parts.path, resume=True, algo=algo, update__steps=3, **shared)
    assert list(read_jsonl(parts.metrics))[-1]["loss/policy"] == lines[-1]["loss/policy"]


def test_what_has_no_use_for_a_hook_refuses_it() -> None:
    with pytest.raises(ValueError, match="weight and step_scale belong to the update"):
        Objective(Algorithm("token", "group", weight=torch.ones_like, step_scale=lambda *_: 1.0))
    with pytest.raises(ValueError, match=r"weight is a function or None, not 0\.5"):
        Algorithm("token", "group", weight=0.5)  # type: ignore[arg-type]
