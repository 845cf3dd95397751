"""The critic's updates through DeepSpeed, its value head in float32 beside it, are those of the local engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.env import ToolUseEnv
from sorl_env.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.means import Means
from sorl_train.learner.update import CriticUpdate
from sorl_train.models.critic import Critic, load_critic
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.models.tiny import build_tiny_policy

from ..rollout.test_sampler import roll
from .conftest import WORLD, run_ranks

pytestmark = pytest.mark.openrlhf
SCRIPT = Path(__file__).with_name("deepspeed_critic.py")
LR = 1.0

# name: ZeRO stage, micro-batches on a rank, dtype, settings
CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "zero 2": (2, 1, torch.float32, {"optim.max_grad_norm": None}),
    "zero 2, accumulated and clipped": (2, 2, torch.float32, {"optim.max_grad_norm": 0.05}),
    "zero 3, accumulated": (3, 2, torch.float32, {"optim.max_grad_norm": None}),
    "zero 3, clipped": (3, 1, torch.float32, {"optim.max_grad_norm": 0.05}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A critic as the local engine saves it, with a head that has learned something.

    Its weights are bfloat16's, so that DeepSpeed's copy begins with the same.
    """
    start, path = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("critic")
    build_tiny_policy(load_task("minihop", **WORLD), start, hidden_size=64, num_layers=2, num_heads=2)
    critic = load_critic(str(start), "cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in critic.backbone.parameters():
            parameter.copy_(parameter.bfloat16())
        critic.head.weight.normal_(std=0.1)
        critic.head.bias.fill_(0.3)
    critic.save(path)
    load_tokenizer(str(start)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """Eight trajectories of different lengths, with returns to learn."""
    start = tmp_path_factory.mktemp("policy")
    build_tiny_policy(load_task("minihop", **WORLD), start, hidden_size=64, num_layers=2, num_heads=2)
    env = ToolUseEnv(load_task("minihop", **WORLD))
    trajectories, _ = roll(env, load_policy(str(start)), load_tokenizer(str(start)), 8)
    batch = collate(trajectories)
    returns = torch.linspace(-1, 1, batch.action_mask.numel()).view(batch.action_mask.shape)
    return batch.with_fields(returns=returns * batch.action_mask)


def settings(batch: Batch, ranks: int, accumulation: int, overrides: dict[str, Any]) -> TrainConfig:
    config = load_config("quickstart", {"algo": "so_ppo", "hardware.device": "cpu", **overrides})
    micro = len(batch) // ranks // accumulation
    return dataclasses.replace(
        config, update=dataclasses.replace(config.update, critic_micro_batch_size=micro)
    )


def local(
    folder: str, batch: Batch, config: TrainConfig, steps: int
) -> tuple[Critic, list[dict[str, float]]]:
    """Steps of plain SGD by the local engine."""
    critic = load_critic(folder, config.hardware.device)
    update = CriticUpdate(critic, torch.optim.SGD(critic.parameters(), lr=LR), config)
    metrics = []
    for _ in range(steps):
        means = Means()
        update.step(batch, LR, means)
        metrics.append(means.result())
    return critic, metrics


def through_deepspeed(
    path: Path, folder: str, batch: Batch, cases: list[dict[str, Any]], ranks: int
) -> list[dict[str, Any]]:
    torch.save({"critic": folder, "batch": batch, "cases": cases}, path / "cases.pt")
    run_ranks(SCRIPT, path, ranks)
    results: list[dict[str, Any]] = torch.load(path / "results.pt", weights_only=False)
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_steps_equal_the_local_engines(ranks: int, folder: str, batch: Batch, tmp_path: Path) -> None:
    cases = [
        {
            "config": settings(batch, ranks, accumulation, overrides),
            "stage": stage,
            "dtype": dtype,
            "steps": 2,
            "sgd": True,
            "poison": False,
        }
        for stage, accumulation, dtype, overrides in CASES.values()
    ]
    for name, case, found in zip(
        CASES, cases, through_deepspeed(tmp_path, folder, batch, cases, ranks), strict=True
    ):
        critic, expected = local(folder, batch, case["config"], 2)
        with torch.no_grad():
            before = load_critic(folder, "cpu")(batch.token_ids, batch.action_mask)
        torch.testing.assert_close(found["values"], before, atol=1e-5, rtol=0, msg=name)
        for ours, theirs in zip(found["metrics"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), name
        assert expected[0]["loss/critic_grad_norm"] > 0.05  # so that clipping bites
        start = load_critic(folder, "cpu")
        for part, parameters in (("parameters", critic.backbone), ("head", critic.head)):
            moved = max(
                float((a.detach() - b.detach()).abs().max())
                for a, b in zip(
                    parameters.parameters(),
                    (start.backbone if part == "parameters" else start.head).parameters(),
                    strict=True,
                )
            )
            wanted = dict(parameters.named_parameters())
            assert found[part].keys() == wanted.keys(), name
            assert moved > 1e-4
            for key, value in found[part].items():
                torch.testing.assert_close(
                    value, wanted[key].detach(), atol=1e-3 * moved, rtol=0, msg=f"{name} {key}"
                )


def test_the_head_stays_in_float32(folder: str, batch: Batch, tmp_path: Path) -> None:
    """In bfloat16 training its values are not those of 8 bits, steps of 1e-5 are not lost, and a save keeps them."""
    config = settings(batch, 1, 1, {})
    case = {"config": config, "dtype": torch.bfloat16, "steps": 2, "sgd": False, "poison": False}
    for found in through_deepspeed(tmp_path, folder, batch, [case | {"stage": s} for s in (2, 3)], 1):
        values = found["values"][batch.action_mask]
        assert values.dtype == torch.float32
        assert (values != values.bfloat16().float()).float().mean() > 0.9
        with torch.no_grad():
            exact = load_critic(folder, "cpu")(batch.token_ids, batch.action_mask)[batch.action_mask]
        assert (values - exact).abs().max() < 0.02  # what bfloat16 in the layers below does
        bias = found["head"]["bias"]
        assert bias.dtype == torch.float32 and 1e-6 < abs(float(bias) - 0.3) < 3e-5
        assert found["came_back"]


def test_a_gradient_of_the_head_that_is_not_finite_ends_the_run_before_the_step(
    folder: str, batch: Batch, tmp_path: Path
) -> None:
    config = settings(batch, 2, 1, {})
    case = {"config": config, "dtype": torch.bfloat16, "steps": 1, "sgd": True, "poison": True}
    start = load_critic(folder, "cpu")
    for found in through_deepspeed(tmp_path, folder, batch, [case | {"stage": s} for s in (2, 3)], 2):
        assert found["not_finite"] == "the critic's gradient"
        wanted = dict(start.backbone.named_parameters())
        assert all(torch.equal(value, wanted[name].detach()) for name, value in found["parameters"].items())
        assert float(found["head"]["bias"]) == pytest.approx(0.3)
