"""The method in one file: three batches as the library trains on them, and a short run that learns."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutJob
from sorl_env.task.registry import load_task
from sorl_env.trajectory import Trajectory
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.advantages import estimate_advantages
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import collate
from sorl_train.learner.optimizer_step import Means, adamw
from sorl_train.learner.scoring import score
from sorl_train.learner.trust_region import final_kl_sample
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.run.folder import RunDir
from sorl_train.train_sft import run

from ..train.conftest import QuietDisplay

FILE = Path(__file__).parents[2] / "docs" / "tutorials" / "so_grpo.py"
WORLD = {"entities": 240, "lookalikes": 4, "train_questions": 48, "test_questions": 32, "hops": [1, 2]}
# with a delta of .05 the draw, and so the processor, decides whether a step shrinks by a tenth
LR, DELTA, LIMIT = 2e-3, 0.02, 0.003


@pytest.fixture(scope="module")
def so_grpo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("so_grpo", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_policy(load_task("minihop", **WORLD), path, hidden_size=48, num_layers=2)
    return str(path)


def rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """The trajectory with another reward, on its last turn."""
    turns = [dataclasses.replace(turn, reward_items={}) for turn in trajectory.turns]
    turns[-1] = dataclasses.replace(turns[-1], reward_items={"exact_match": reward})
    return dataclasses.replace(
        trajectory, turns=tuple(turns), reward=reward, reward_items={"exact_match": reward}
    )


def batches(so_grpo: ModuleType, folder: str) -> list[list[Trajectory]]:
    """Three batches of an untrained policy, with rewards drawn at random; one group of each has equal rewards."""
    env, draw = ToolUseEnv(load_task("minihop", **WORLD)), np.random.default_rng(0)
    env.limits = dataclasses.replace(env.limits, max_turns=3, max_new_tokens=12)
    found = []
    for number in range(3):
        questions = range(4 * number, 4 * number + so_grpo.QUESTIONS)
        jobs = [RolloutJob(f"{q}-{g}", f"{q}", q, g) for q in questions for g in range(so_grpo.GROUP)]
        rewards = draw.integers(0, 2, len(jobs)).astype(float)
        rewards[: so_grpo.GROUP] = 1.0
        torch.manual_seed(number)
        played = so_grpo.play(env, load_policy(folder), load_tokenizer(folder), jobs)
        found.append([rewarded(t, float(r)) for t, r in zip(played, rewards, strict=True)])
    return found


def weights(model: Any) -> torch.Tensor:
    """A copy of all parameters, one after the other."""
    return torch.cat([w.detach().flatten() for w in model.parameters()]).clone()


class EachStep(Means):
    """Keeps the metrics of each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def add(self, **values: float) -> None:
        self.steps.append(values)
        super().add(**values)


def library_steps(
    config: TrainConfig, update: PolicyUpdate, played: list[Trajectory], orders: list[torch.Tensor]
) -> list[dict[str, float]]:
    """The metrics of the library's steps on one batch, and of its trust region. The rows of each step are given."""
    batch = collate(played)
    batch = batch.with_fields(**score(batch, {"old_log_probs": update.backend}, 16))
    batch = estimate_advantages(batch, "group", config.loss)
    means = EachStep()
    for _ in update.steps([batch.rows(rows) for rows in orders], 0, means):
        pass
    update.end_batch(batch.rows(final_kl_sample(batch.loss_mask)), means)
    return means.steps


def test_three_batches_as_the_library_trains(so_grpo: ModuleType, folder: str) -> None:
    """In float64, where the optimizer cannot blow up what rounding does to gradients near 0. The library keeps
    log-probabilities in float32, so losses agree to about 1e-7."""
    options = {"update.trust_kl": LIMIT, "loss.clip_bias_delta": DELTA, "optim.lr": LR}
    options |= {"algo": "so_grpo", "optim.max_grad_norm": so_grpo.MAX_GRAD_NORM}
    config = load_config("off_policy", options)
    ours, theirs = load_policy(folder).double(), load_policy(folder).double()
    start = weights(ours)
    optimizer = torch.optim.AdamW(ours.parameters(), weight_decay=0.0)
    trust = so_grpo.TrustRegion(ours, LIMIT)
    update = PolicyUpdate(TorchBackend(theirs, adamw(theirs, config.optim), dtype="float32"), config)
    assert update.trust is not None
    moves, normalizers = 0, []
    for number, played in enumerate(batches(so_grpo, folder)):
        torch.manual_seed(number)
        size = so_grpo.QUESTIONS * so_grpo.GROUP
        orders = [r for _ in range(so_grpo.EPOCHS) for r in torch.randperm(size).split(so_grpo.MINI_BATCH)]
        torch.manual_seed(number)
        found = list(so_grpo.update(ours, optimizer, trust, played, LR, DELTA))
        *steps, _ = library_steps(config, update, played, orders)
        wanted = [[s[k] for k in ("policy", "clip_bias_norm", "clip_frac", "normalizer")] for s in steps]
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-7)
        assert trust.moves == update.trust.moves
        ours_here = (trust.scale, trust.recent, trust.largest)
        theirs_here = (update.trust.scale, update.trust.recent_max_kl, update.trust.largest)
        assert ours_here == pytest.approx(theirs_here, rel=1e-5)
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=2e-6)
        moves += trust.moves
        normalizers += [row[3] for row in found]
    assert moves > 0 and trust.scale < 1.0  # the trust region acted
    assert min(normalizers) < 0.9 and max(normalizers) == 1.0  # and so did the normalization
    assert float((weights(ours) - start).abs().max()) > 1e-3


@pytest.mark.slow
def test_a_short_run_learns(so_grpo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a policy that imitates an expert who often stops one search too early: about two minutes on two cores."""
    config = load_config("off_policy", {"algo": "so_grpo", "stage": "sft"})
    run(config, RunDir.create(tmp_path / "cold", config), QuietDisplay(), resume=False)
    folder = str(tmp_path / "cold" / "checkpoints" / "best" / "policy")
    envs = [ToolUseEnv(load_task("minihop"), split=split) for split in ("train", "test")]
    torch.manual_seed(0)
    before, after = so_grpo.train(load_policy(folder), load_tokenizer(folder), *envs)
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 14 and lines[0].startswith("before training") and lines[-1].startswith("after training")
    )
    assert after >= before + 0.1, lines
