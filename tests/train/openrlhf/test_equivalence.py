"""A batch through this engine and through the local one: the same loss, clipping bias, normalizer and gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.env import ToolUseEnv
from sorl_env.registry import load_task
from sorl_env.token_classes import TokenClassifier
from sorl_env.trajectory import StopReason
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.advantages import correct
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.means import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.models.tiny import build_tiny_policy

from ..learner.test_update import off_policy
from ..rollout.test_sampler import roll
from .conftest import WORLD, run_ranks

pytestmark = pytest.mark.openrlhf
SCRIPT = Path(__file__).with_name("deepspeed_step.py")
LR = 1e3  # so large that the step shows the gradient to more digits than the weights have


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_policy(load_task("minihop", **WORLD), path, hidden_size=64, num_layers=2, num_heads=2)
    return str(path)


@pytest.fixture(scope="module")
def batch(folder: str) -> Batch:
    """Eight trajectories, one of them excluded, far off policy, with some reference to be away from."""
    env = ToolUseEnv(load_task("minihop", **WORLD))
    trajectories, _ = roll(env, load_policy(folder), load_tokenizer(folder), 8)
    trajectories[3] = dataclasses.replace(trajectories[3], stop_reason=StopReason.ERROR)
    drifted = off_policy(collate(trajectories, classify=TokenClassifier(load_tokenizer(folder))))
    return drifted.with_fields(ref_log_probs=drifted.rollout_log_probs * 0.9)


def settings(**overrides: Any) -> TrainConfig:
    base = {"loss.clip_bias_delta": 1e-3, "loss.kl_coef": 0.05, "optim.max_grad_norm": None}
    return load_config("quickstart", overrides, shared=base)


def local_step(
    folder: str, batch: Batch, config: TrainConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Parameters before and after a step of plain SGD, and the metrics."""
    model = load_policy(folder, config.hardware.device)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    update = PolicyUpdate(model, torch.optim.SGD(model.parameters(), lr=LR), config)
    means = Means()
    update.step(batch, LR, means)
    return before, torch.cat([p.detach().flatten() for p in model.parameters()]), means.result()


def case(
    folder: str, batch: Batch, config: TrainConfig, stage: int, dtype: torch.dtype, poison: bool = False
) -> dict[str, Any]:
    more = {"max_grad_norm": config.optim.max_grad_norm or 0.0, "poison": poison}
    return {"config": config, "model": folder, "batch": batch, "stage": stage, "dtype": dtype, **more}


def deepspeed_steps(path: Path, ranks: int, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    torch.save(list(cases), path / "cases.pt")
    run_ranks(SCRIPT, path, ranks)
    results: list[dict[str, Any]] = torch.load(path / "results.pt", weights_only=False)
    return results


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation", "overrides"),
    [
        (1, 2, 1, {}),
        (1, 2, 4, {"loss.clip_bias_target": "gradient"}),
        (1, 3, 4, {}),
        (2, 2, 4, {"loss.clip_bias_target": "gradient", "optim.max_grad_norm": 0.01}),
        (2, 3, 1, {"algo": "so_grpo", "rollout.group_size": 4}),
        (2, 3, 4, {"loss.clip_bias_target": "gradient"}),
        (2, 2, 4, {"correction.mode": "band", "correction.sequence_mask": 0.6}),
    ],
)
def test_the_step_equals_the_local_engines(
    ranks: int,
    stage: int,
    accumulation: int,
    overrides: dict[str, Any],
    folder: str,
    batch: Batch,
    tmp_path: Path,
) -> None:
    micro = len(batch) // ranks // accumulation
    batch, corrected = correct(batch, settings(**overrides))
    assert ("correction.mode" in overrides) == (0 < corrected.get("loss/correction_zero_frac", 0) < 1)
    before, after, expected = local_step(folder, batch, settings(**overrides))
    config = settings(**overrides, **{"update.micro_batch_size": micro})
    (found,) = deepspeed_steps(tmp_path, ranks, case(folder, batch, config, stage, torch.float32))
    assert expected["loss/normalizer"] != 1.0 and expected["loss/clip_frac"] > 0.1
    assert {"loss/ess_turn", "loss/log_ratio_p99_sequence", "loss/clip_frac_turn1"} <= set(expected)
    assert {"loss/clip_frac_tag", "loss/clip_bias_logit", "loss/ref_kl", "loss/entropy"} <= set(expected)
    assert found["metrics"] == pytest.approx(expected, rel=1e-4)  # the same names, too
    for name in ("policy", "clip_bias_norm", "normalizer", "clip_frac", "grad_norm", "effective_lr"):
        assert found["metrics"][f"loss/{name}"] == pytest.approx(expected[f"loss/{name}"], rel=1e-5), name
    scale = (after - before).abs().max()
    torch.testing.assert_close(found["parameters"], after, atol=1e-5 * float(scale), rtol=0)


def of_algorithm(algo: str, **more: Any) -> TrainConfig:
    return settings(**{"algo": algo, "rollout.group_size": 4 if ALGORITHMS[algo].needs_groups else 1}, **more)


@pytest.fixture(scope="module")
def by_algorithm(
    folder: str, batch: Batch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The step of each algorithm, all in one process: its start takes longer than they do."""
    cases = [
        case(folder, batch, of_algorithm(algo, **{"update.micro_batch_size": 4}), 2, torch.bfloat16)
        for algo in ALGORITHMS
    ]
    path = tmp_path_factory.mktemp("algorithms")
    return dict(zip(ALGORITHMS, deepspeed_steps(path, 1, *cases), strict=True))


@pytest.mark.parametrize("algo", list(ALGORITHMS))
def test_every_algorithm_in_bfloat16(
    algo: str, folder: str, batch: Batch, by_algorithm: dict[str, dict[str, Any]]
) -> None:
    """bfloat16 has 8 bits: figures within 5%, gradients within 5% of their norm."""
    *_, expected = local_step(folder, batch, of_algorithm(algo))
    found = by_algorithm[algo]["metrics"]
    for name in ("clip_bias_norm", "normalizer", "clip_frac", "grad_norm"):
        assert found[f"loss/{name}"] == pytest.approx(expected[f"loss/{name}"], rel=0.05), name


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(
    stage: int, folder: str, batch: Batch, tmp_path: Path
) -> None:
    """On one rank of two; DeepSpeed by itself would leave the step out (2) or put NaN into the weights (3)."""
    config = settings(**{"update.micro_batch_size": 2})
    poisoned = case(folder, batch, config, stage, torch.bfloat16, poison=True)
    (found,) = deepspeed_steps(tmp_path, 2, poisoned)
    assert found["not_finite"] == "the policy gradient"
    before = [
        p.detach().bfloat16().float().flatten()
        for p in load_policy(folder, config.hardware.device).parameters()
    ]
    assert torch.equal(found["parameters"], torch.cat(before))
