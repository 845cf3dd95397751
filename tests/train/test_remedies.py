"""The remedies of others in benchmarks/remedies.py by hand computation, and the hooks that they need."""

from __future__ import annotations

import dataclasses
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_train.algorithms import Algorithm
from sorl_train.config.find_algorithm import algorithm_facts, find_algorithm
from sorl_train.lab.study import load_study
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.losses.policy import ClipRange, policy_loss
from sorl_train.models.policy import load_policy
from sorl_train.plugins.objective import Objective
from sorl_train.run.files import read_jsonl

from .conftest import short_config, train_short, weights_of
from .learner.test_trust_region import batch as batch  # a fixture

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FILE = BENCHMARKS / "remedies.py"
REMEDIES: dict[str, Any] = runpy.run_path(str(FILE))
# two trajectories, of three tokens and of two; what is off the mask must not be read
MASK = torch.tensor([[True, True, True], [True, True, False]])
OLD = torch.tensor([[0.5, 0.5, 0.1], [0.9, 0.4, math.nan]]).log()
NEW = torch.tensor([[0.7, 0.3, 0.2], [0.45, 0.4, math.nan]]).log()
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])


def weights(name: str, **settings: Any) -> list[list[float]]:
    found = REMEDIES[name](NEW, OLD, ADVANTAGES, MASK, **settings)
    kept = found.masked_fill(~MASK, 0.0).tolist()
    return [[round(value, 4) for value in row] for row in kept]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        # moved by +.2, -.2, +.1 with A > 0, and by -.45, 0 with A < 0
        ("dppo_tv", {"delta": 0.15}, [[0, 1, 1], [0, 1, 0]]),
        ("dppo_tv", {"delta": 0.3}, [[1, 1, 1], [0, 1, 0]]),
        # the second trajectory has drifted by ln(2) / 2 = .3466
        ("drifted", {"delta": 0.34}, [[1, 1, 1], [0, 0, 0]]),
        ("drifted", {"delta": 0.35}, [[1, 1, 1], [1, 1, 0]]),
        # the first has the product .7 / .5 * .3 / .5 * 2 = 1.68, a mean logarithm of .1729
        ("geometric", {"bound": 0.2}, [[1, 1, 1], [0, 0, 0]]),
        ("geometric", {"bound": 0.17}, [[0, 0, 0], [0, 0, 0]]),
        # squares of those that are pushed on: ln(1.4)^2 = .1132, ln(2)^2 = .4805 twice; their means .1132, .2968, .3581
        ("second_moment", {"tau": 0.36}, [[1, 1, 1], [1, 1, 0]]),
        ("second_moment", {"tau": 0.3}, [[1, 1, 1], [0, 1, 0]]),
        ("second_moment", {"tau": 0.2}, [[1, 1, 0], [0, 1, 0]]),
        ("second_moment", {"tau": 0.1}, [[0, 1, 0], [0, 1, 0]]),
        # 1.68^2 exp(3 (1 - 1.68)) = .367, and .5^3 exp(2 (1 - .5)) = .3398
        ("vespo", {"positive": (2, 3), "negative": (3, 2)}, [[0.367] * 3, [0.3398, 0.3398, 0]]),
        ("truncated_sequence", {}, [[1.68] * 3, [0.5, 0.5, 0]]),
    ],
)
def test_weights_by_hand(name: str, settings: dict[str, Any], expected: list[list[float]]) -> None:
    assert weights(name, **settings) == expected


def test_a_sequence_weight_is_at_most_eight_and_the_effective_size_is_not_truncated() -> None:
    old = OLD - torch.tensor([[math.log(10.0), 0.0, 0.0], [0.0, 0.0, 0.0]])  # the first product is 16.8
    assert REMEDIES["truncated_sequence"](NEW, old, ADVANTAGES, MASK)[0].tolist() == [8.0] * 3
    share = (16.8 + 0.5) ** 2 / (16.8**2 + 0.5**2) / 2
    for power in (0.5, 2.0):
        found = REMEDIES["effective_size"](NEW, old, ADVANTAGES, MASK, power=power)
        assert found == pytest.approx(share**power, rel=1e-6)
    assert REMEDIES["effective_size"](OLD, OLD, ADVANTAGES, MASK, power=0.5) == pytest.approx(1.0)
    assert REMEDIES["effective_size"](OLD, OLD, ADVANTAGES, MASK & False, power=0.5) == 1.0


def test_surrogates_have_the_published_gradient() -> None:
    ratio, advantage = torch.tensor([0.5, 3.0], requires_grad=True), torch.tensor([1.0, -2.0])
    for name, expected in {"unclipped": [1.0, -2.0], "reinforce": [2.0, -2.0 / 3.0]}.items():
        (found,) = torch.autograd.grad(REMEDIES[name](ratio, advantage, ClipRange()).sum(), ratio)
        assert found.tolist() == pytest.approx(expected)


def test_each_half_of_the_trust_region_alone() -> None:
    """A weight began at 0 and stands at 1; the KL is its square. At a limit of .5 the region would take half of the
    step back and halve the scale."""
    for name, (place, scale) in {"BackAlone": (0.5, 1.0), "ShrinkAlone": (1.0, 0.5)}.items():
        weight = torch.zeros(1)
        trust = REMEDIES[name](lambda weight=weight: [weight], 0.5, 1.0)
        trust.begin()
        assert not trust.step(0.0)
        weight.fill_(1.0)
        while trust.end(float(weight.square())):
            pass
        assert (float(weight), trust.scale, trust.largest) == (place, scale, 1.0), name
        assert trust.recent_max_kl == 0.5  # the limit


def test_the_rate_follows_the_kl() -> None:
    trust = REMEDIES["KLAdaptive"](list, 0.1, 1.0)
    trust.load_state_dict({"scale": 3.0, "recent": 0.0})
    trust.begin()
    scales = []
    for kl in (0.04, 0.21, 0.2, 0.05, 0.04, 0.0):  # the first is before any step
        assert not trust.step(kl)
        scales.append(round(trust.scale, 6))
    assert scales == [3.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert not trust.end(0.3) and trust.scale == 3.0  # rsl_rl does not measure after the last step
    for kl, limit in ((1.0, 0.01), (0.01, 10.0)):
        for _ in range(20):
            trust.step(kl)
        assert trust.scale == limit


# -- the hooks --------------------------------------------------------------------------------------------------------


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


def test_a_remedy_is_trained_and_resumed(tmp_path: Path) -> None:
    """A rate that leaves the region at once: the weights go back, the rate stays, and both states are kept."""
    shared = {"optim__lr": 0.1, "optim__warmup_ratio": 0.0, "optim__schedule": "constant"}
    for name, moves in {"grpo_back_0.01": True, "grpo_kl_adaptive_0.01": False}.items():
        algo = f"{FILE}:{name}"
        whole, _ = train_short(tmp_path / name, algo=algo, update__steps=3, **shared)
        lines = list(read_jsonl(whole.metrics))[1:]
        assert any(line["loss/trust_moves_back"] for line in lines) == moves
        assert all(line["loss/trust_scale"] == 1.0 for line in lines) == moves
        parts, _ = train_short(tmp_path / f"{name} in parts", algo=algo, update__steps=2, **shared)
        train_short(parts.path, resume=True, algo=algo, update__steps=3, **shared)
        last = list(read_jsonl(parts.metrics))[-1]
        assert last["loss/trust_scale"] == lines[-1]["loss/trust_scale"]
        assert last["loss/policy"] == lines[-1]["loss/policy"]


def test_rows_and_studies() -> None:
    rows = {name: row for name, row in REMEDIES.items() if isinstance(row, Algorithm)}
    assert len(rows) == 2 * len(REMEDIES["REMEDIES"])
    for name in rows:
        assert find_algorithm(f"{FILE}:{name}").about == rows[name].about
    assert algorithm_facts(f"{FILE}:ppo_vcpo")["weight"] == "truncated_sequence"
    study = load_study(str(BENCHMARKS / "remedies.yaml"))
    assert len(study.runs) == 30 * 25
    arms = {run.arm for run in study.runs}
    assert {arm.removeprefix("grpo ") for arm in arms if arm.startswith("grpo ")} == {
        arm.removeprefix("ppo ") for arm in arms if arm.startswith("ppo ")
    }
    tried = load_study(str(BENCHMARKS / "remedies_settings.yaml")).runs
    points = {(run.config.update.epochs, run.config.optim.lr) for run in study.runs}
    assert not points & {(run.config.update.epochs, run.config.optim.lr) for run in tried}


def test_what_has_no_use_for_a_hook_refuses_it() -> None:
    with pytest.raises(ValueError, match="weight and step_scale belong to the update"):
        Objective(REMEDIES["grpo_vcpo"])
    with pytest.raises(ValueError, match=r"weight is a function or None, not 0\.5"):
        Algorithm("token", "group", weight=0.5)  # type: ignore[arg-type]
    loss = policy_loss(OLD, OLD, ADVANTAGES, MASK, torch.zeros(2, 3, dtype=torch.long)).loss
    assert torch.isfinite(loss)  # what is off the mask, as above, is never read
