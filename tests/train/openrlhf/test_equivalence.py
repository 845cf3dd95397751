"""A batch through this engine and through the local one: the same loss, clipping bias, normalizer and gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sorl_env.trajectory import StopReason, Trajectory
from sorl_env.trajectory.token_classes import TokenClassifier
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.advantages import correct
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy, load_tokenizer

from ..conftest import weights_of
from ..learner.test_update import off_policy
from .conftest import deepspeed_results

pytestmark = pytest.mark.openrlhf
LR = 1e5  # so large that a rounding of the weights, up to 5, does not hide 1e-5 of the step

# ranks, ZeRO stage, micro-batches of a rank, settings
STEPS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "zero 2": (1, 2, 1, {}),
    "zero 2, accumulated": (1, 2, 4, {"loss.clip_bias_target": "gradient"}),
    "zero 3, accumulated": (1, 3, 4, {}),
    "two ranks, clipped": (2, 2, 4, {"loss.clip_bias_target": "gradient", "optim.max_grad_norm": 0.01}),
    "two ranks, groups": (2, 3, 1, {"algo": "so_grpo", "rollout.group_size": 4}),
    "two ranks, zero 3, accumulated": (2, 3, 4, {"loss.clip_bias_target": "gradient"}),
    "two ranks, corrected": (2, 2, 4, {"correction.mode": "band", "correction.sequence_mask": 0.6}),
    # a trajectory for each, and none to train on for the rank with the excluded one
    "eight ranks": (8, 2, 1, {}),
    "eight ranks, zero 3": (8, 3, 1, {"loss.clip_bias_target": "gradient"}),
}
THREE_STEPS = {"eight ranks": 10.0, "eight ranks, zero 3": 10.0}  # at a rate that three steps bear
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def batch(tiny_folder: str, trajectories: list[Trajectory]) -> Batch:
    """Eight trajectories, one of them excluded, far off policy, with some reference to be away from."""
    lost = dataclasses.replace(trajectories[3], stop_reason=StopReason.ERROR)
    found = [*trajectories[:3], lost, *trajectories[4:]]
    drifted = off_policy(collate(found, classify=TokenClassifier(load_tokenizer(tiny_folder))))
    return drifted.with_fields(ref_log_probs=drifted.rollout_log_probs * 0.9)


def settings(**overrides: Any) -> TrainConfig:
    base = {"loss.clip_bias_delta": 1e-3, "loss.kl_coef": 0.05, "optim.max_grad_norm": None}
    return load_config("minihop", overrides, shared=base)


def of_algorithm(algo: str) -> TrainConfig:
    groups = ALGORITHMS[algo].needs_groups
    micro = {"update.micro_batch_size": 4}
    return settings(algo=algo, **{"rollout.group_size": 4 if groups else 1}, **micro)


@pytest.fixture(scope="module")
def results(tiny_folder: str, batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the first rank found, by case; one start for each number of ranks."""
    cases: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}, 8: {}}
    common: dict[str, Any] = {"kind": "policy", "model": tiny_folder, "lr": LR}
    for name, (ranks, stage, accumulation, overrides) in STEPS.items():
        config = settings(**overrides, **{"update.micro_batch_size": len(batch) // ranks // accumulation})
        own = {
            "config": config,
            "batch": correct(batch, config.correction, config.algorithm.ratio)[0],
            "stage": stage,
            "dtype": torch.float32,
        }
        cases[ranks][name] = common | own
        if name in THREE_STEPS:
            cases[ranks][f"{name}, three steps"] = common | own | {"lr": THREE_STEPS[name], "steps": 3}
    common |= {"batch": batch, "dtype": torch.bfloat16}
    for algo in ALGORITHMS:
        cases[1][algo] = common | {"config": of_algorithm(algo), "stage": 2}
    poisoned = common | {"config": settings(**{"update.micro_batch_size": 2}), "poison": True}
    for stage in (2, 3):
        cases[2][f"poisoned, zero {stage}"] = poisoned | {"stage": stage}
    found: Results = {}
    for ranks, of_ranks in cases.items():
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        found |= {name: one[0] for name, one in deepspeed_results(folder, ranks, of_ranks).items()}
    return found


def local_step(
    folder: str, batch: Batch, config: TrainConfig, lr: float = LR, steps: int = 1
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Parameters before and after steps of plain SGD, and the metrics."""
    model = load_policy(folder, config.hardware.device)
    before = weights_of(model)
    update = PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters(), lr=lr)), config)
    means = Means()
    for _ in range(steps):
        update.step(batch, lr, means)
    return before, weights_of(model), means.result()


@pytest.mark.parametrize("name", STEPS)
def test_the_step_equals_the_local_engines(
    name: str, tiny_folder: str, batch: Batch, results: Results
) -> None:
    config = settings(**STEPS[name][3])
    batch, corrected = correct(batch, config.correction, config.algorithm.ratio)
    assert config.correction.is_on == (0 < corrected.get("loss/correction_zero_frac", 0) < 1)
    before, after, expected = local_step(tiny_folder, batch, config)
    found = results[name]
    assert expected["loss/normalizer"] != 1.0 and expected["loss/clip_frac"] > 0.1
    assert {"loss/ess_turn", "loss/log_ratio_p99_sequence", "loss/clip_frac_turn1"} <= set(expected)
    assert {"loss/clip_frac_tag", "loss/clip_bias_logit", "loss/ref_kl", "loss/entropy"} <= set(expected)
    assert found["metrics"] == pytest.approx(expected, rel=1e-4)  # the same names, too
    for figure in ("policy", "clip_bias_norm", "normalizer", "clip_frac", "grad_norm", "effective_lr"):
        ours, theirs = found["metrics"][f"loss/{figure}"], expected[f"loss/{figure}"]
        assert ours == pytest.approx(theirs, rel=1e-5), figure
    scale = (after - before).abs().max()
    torch.testing.assert_close(found["parameters"], after, atol=1e-5 * float(scale), rtol=0)


@pytest.mark.parametrize("name", THREE_STEPS)
def test_eight_ranks_stay_with_one_for_three_steps(
    name: str, tiny_folder: str, batch: Batch, results: Results
) -> None:
    config = settings(**STEPS[name][3])
    batch, _ = correct(batch, config.correction, config.algorithm.ratio)
    before, after, _ = local_step(tiny_folder, batch, config, THREE_STEPS[name], 3)
    found = results[f"{name}, three steps"]["parameters"]
    once = local_step(tiny_folder, batch, config, THREE_STEPS[name], 1)[1]
    assert (after - once).abs().max() > 0.5 * (once - before).abs().max()  # the later steps did something
    torch.testing.assert_close(found, after, atol=1e-5, rtol=0)


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_every_algorithm_in_bfloat16(algo: str, tiny_folder: str, batch: Batch, results: Results) -> None:
    """bfloat16 has 8 bits: figures within 5%, gradients within 5% of their norm."""
    *_, expected = local_step(tiny_folder, batch, of_algorithm(algo))
    found = results[algo]["metrics"]
    for name in ("clip_bias_norm", "normalizer", "clip_frac", "grad_norm"):
        assert found[f"loss/{name}"] == pytest.approx(expected[f"loss/{name}"], rel=0.05), name


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(
    stage: int, tiny_folder: str, results: Results
) -> None:
    """On one rank of two; DeepSpeed by itself would leave the step out (2) or put NaN into the weights (3)."""
    found = results[f"poisoned, zero {stage}"]
    assert found["not_finite"] == "the policy gradient"
    before = [p.detach().bfloat16().float().flatten() for p in load_policy(tiny_folder, "cpu").parameters()]
    assert torch.equal(found["parameters"], torch.cat(before))
