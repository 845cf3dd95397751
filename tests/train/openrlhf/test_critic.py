"""The critic's updates through DeepSpeed, its value head in float32 beside it, are those of the local engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sorl_env.trajectory import Trajectory
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.update import CriticUpdate
from sorl_train.models.policy import Critic, load_critic, load_tokenizer

from .conftest import deepspeed_results

pytestmark = pytest.mark.openrlhf
LR = 1.0

# ZeRO stage, micro-batches of a rank, settings; two steps in float32, on one and on two ranks
STEPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero 2": (2, 1, {"optim.max_grad_norm": None}),
    "zero 2, accumulated and clipped": (2, 2, {"optim.max_grad_norm": 0.05}),
    "zero 3, accumulated": (3, 2, {"optim.max_grad_norm": None}),
    "zero 3, clipped": (3, 1, {"optim.max_grad_norm": 0.05}),
}
Results = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A critic as the local engine saves it, with a head that has learned something.

    Its weights are bfloat16's, so that DeepSpeed's copy begins with the same.
    """
    path = tmp_path_factory.mktemp("critic")
    critic = load_critic(tiny_folder, "cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in critic.backbone.parameters():
            parameter.copy_(parameter.bfloat16())
        critic.head.weight.normal_(std=0.1)
        critic.head.bias.fill_(0.3)
    critic.save(path)
    load_tokenizer(tiny_folder).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def batch(trajectories: list[Trajectory]) -> Batch:
    """Eight trajectories of different lengths, with returns to learn."""
    batch = collate(trajectories)
    returns = torch.linspace(-1, 1, batch.action_mask.numel()).view(batch.action_mask.shape)
    return batch.with_fields(returns=returns * batch.action_mask)


def settings(batch: Batch, ranks: int = 1, accumulation: int = 1, **overrides: Any) -> TrainConfig:
    config = load_config("minihop", {"algo": "so_ppo", "hardware.device": "cpu", **overrides})
    micro = len(batch) // ranks // accumulation
    return dataclasses.replace(
        config, update=dataclasses.replace(config.update, critic_micro_batch_size=micro)
    )


@pytest.fixture(scope="module")
def results(folder: str, batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the first rank found, by ranks and case."""
    found: Results = {}
    for ranks in (1, 2):
        common = {"kind": "critic", "model": folder, "batch": batch, "lr": LR, "steps": 2, "sgd": True}
        cases = {
            name: common
            | {"config": settings(batch, ranks, accumulation, **overrides), "stage": stage}
            | {"dtype": torch.float32}
            for name, (stage, accumulation, overrides) in STEPS.items()
        }
        common |= {"config": settings(batch, ranks), "dtype": torch.bfloat16}
        for stage in (2, 3):
            more = {"sgd": False} if ranks == 1 else {"steps": 1, "poison": True}
            cases[f"bfloat16, zero {stage}"] = common | more | {"stage": stage}
        path = tmp_path_factory.mktemp(f"ranks_{ranks}")
        by_name = deepspeed_results(path, ranks, cases)
        found |= {(ranks, name): of_ranks[0] for name, of_ranks in by_name.items()}
    return found


def local(folder: str, batch: Batch, config: TrainConfig) -> tuple[Critic, list[dict[str, float]]]:
    """Two steps of plain SGD by the local engine."""
    critic = load_critic(folder, "cpu")
    update = CriticUpdate(TorchBackend(critic, torch.optim.SGD(critic.parameters(), lr=LR)), config)
    metrics = []
    for _ in range(2):
        means = Means()
        update.step(batch, LR, means)
        metrics.append(means.result())
    return critic, metrics


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_steps_equal_the_local_engines(
    ranks: int, name: str, folder: str, batch: Batch, results: Results
) -> None:
    found, start = results[ranks, name], load_critic(folder, "cpu")
    critic, expected = local(folder, batch, settings(batch, **STEPS[name][2]))
    with torch.no_grad():
        before = start(batch.token_ids, batch.action_mask)
    torch.testing.assert_close(found["values"], before, atol=1e-5, rtol=0)
    for ours, theirs in zip(found["metrics"], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert expected[0]["loss/critic_grad_norm"] > 0.05  # so that clipping bites
    for part, first, after in (
        ("parameters", start.backbone, critic.backbone),
        ("head", start.head, critic.head),
    ):
        wanted, old = dict(after.named_parameters()), dict(first.named_parameters())
        assert found[part].keys() == wanted.keys()
        moved = max(float((wanted[key] - old[key]).detach().abs().max()) for key in wanted)
        assert moved > 1e-4
        for key, value in found[part].items():
            torch.testing.assert_close(value, wanted[key].detach(), atol=1e-3 * moved, rtol=0, msg=key)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_head_stays_in_float32(stage: int, folder: str, batch: Batch, results: Results) -> None:
    """In bfloat16 training its values are not those of 8 bits, steps of 1e-5 are not lost, and a save keeps them."""
    found = results[1, f"bfloat16, zero {stage}"]
    values = found["values"][batch.action_mask]
    assert values.dtype == torch.float32
    assert (values != values.bfloat16().float()).float().mean() > 0.9
    with torch.no_grad():
        exact = load_critic(folder, "cpu")(batch.token_ids, batch.action_mask)[batch.action_mask]
    assert (values - exact).abs().max() < 0.02  # what bfloat16 in the layers below does
    bias = found["head"]["bias"]
    assert bias.dtype == torch.float32 and 1e-6 < abs(float(bias) - 0.3) < 3e-5
    assert found["came_back"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_of_the_head_that_is_not_finite_ends_the_run_before_the_step(
    stage: int, folder: str, results: Results
) -> None:
    found = results[2, f"bfloat16, zero {stage}"]
    assert found["not_finite"] == "the critic's gradient"
    wanted = dict(load_critic(folder, "cpu").backbone.named_parameters())
    assert all(torch.equal(value, wanted[name].detach()) for name, value in found["parameters"].items())
    assert float(found["head"]["bias"]) == pytest.approx(0.3)
