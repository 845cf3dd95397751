"""The trust region on DeepSpeed's shards and in whole runs: weights that went too far are where they ought to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy
from sorl_train.run.files import read_jsonl

from ..conftest import weights_of
from ..learner.test_trust_region import batch as batch  # a fixture
from ..learner.test_trust_region import current
from .conftest import deepspeed_results, metrics, train
from .test_equivalence import settings

pytestmark = pytest.mark.openrlhf
RATE = 30.0  # leaves the region in each batch


# ranks, ZeRO stage, micro-batch size, DeepSpeed's threshold for parameters that every rank holds
SHARDS = {(1, 2): (4, 0), (2, 2): (1, 0), (1, 3): (2, 10**6), (2, 3): (1, 0)}
IN_BFLOAT16 = [(1, 2), (2, 3)]
Results = dict[tuple[int, int, bool], list[dict[str, Any]]]


def case_of(folder: str, batch: Batch, micro: int, **more: Any) -> dict[str, Any]:
    # four, three and one trajectory: DeepSpeed is started for four, and two ranks have fillers
    minis = [batch.rows(rows) for rows in (range(0, 8, 2), range(1, 7, 2), [7])] * 2
    config = settings(
        **{"update.trust_kl": 0.01, "update.micro_batch_size": micro, "loss.kl_coef": 0.0, "algo": "ppo"}
    )
    sample = batch.rows(range(0, 9, 2))
    return {"kind": "trust", "model": folder, "config": config, "minis": minis, "sample": sample, **more}


@pytest.fixture(scope="module")
def results(tiny_folder: str, batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found, by ranks, ZeRO stage and whether it was in bfloat16."""
    cases: dict[int, dict[tuple[int, int, bool], Any]] = {1: {}, 2: {}}
    for (ranks, stage), (micro, persistent) in SHARDS.items():
        own = {"stage": stage, "dtype": torch.float32, "lr": RATE, "persistent": persistent}
        cases[ranks][ranks, stage, False] = case_of(tiny_folder, batch, micro, **own)
    adam = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}  # DeepSpeed would compile its own
    for ranks, stage in IN_BFLOAT16:
        own = {"stage": stage, "dtype": torch.bfloat16, "lr": 0.1, "persistent": 10**6, "optimizer": adam}
        cases[ranks][ranks, stage, True] = case_of(tiny_folder, batch, 2, **own)
    found: Results = {}
    for ranks, of_ranks in cases.items():
        found |= deepspeed_results(tmp_path_factory.mktemp(f"ranks_{ranks}"), ranks, of_ranks)
    return found


@pytest.fixture(scope="module")
def local(tiny_folder: str, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, float]]]:
    """Weights before and after, and metrics, of the same updates by the local engine's class with plain SGD."""
    case, model, found = case_of(tiny_folder, batch, 4), load_policy(tiny_folder), []
    before = weights_of(model)
    update = PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters(), lr=RATE)), case["config"])
    for rate in (RATE, 100 * RATE):  # in the second batch the scale is small already
        means = Means()
        *minis, sample = (
            part.with_fields(start_log_probs=current(model, part))
            for part in (*case["minis"], case["sample"])
        )
        update.begin_batch()
        for mini in minis:
            update.step(mini, rate, means)
        update.end_batch(sample, means)
        found.append(means.result())
    return before, weights_of(model), found


@pytest.mark.parametrize(("ranks", "stage"), SHARDS)
def test_moves_back_on_shards_equal_the_local_engines(
    ranks: int, stage: int, results: Results, local: tuple[Any, Any, list[dict[str, float]]]
) -> None:
    """Plain SGD in float32 at a rate that leaves the region in each batch, over ranks and micro-batches."""
    before, after, expected = local
    assert all(found["loss/trust_moves_back"] >= 1 for found in expected)
    compared = "trust_moves_back trust_scale trust_kl trust_kl_max approx_kl grad_norm".split()
    for result in results[ranks, stage, False]:
        assert result["error"] < 1e-4 and result["behind"] == 0.0
        for found, wanted in zip(result["metrics"], expected, strict=True):
            for name in compared:
                assert found[f"loss/{name}"] == pytest.approx(wanted[f"loss/{name}"], rel=2e-3), name
        distance = float((after - before).abs().max())
        torch.testing.assert_close(result["parameters"], after, atol=2e-3 * distance, rtol=0)


@pytest.mark.parametrize(("ranks", "stage"), IN_BFLOAT16)
def test_bfloat16_weights_follow_those_of_the_optimizer(ranks: int, stage: int, results: Results) -> None:
    """Adam at a rate of .1: DeepSpeed's own reading of the float32 weights is what each rank computes with."""
    of_ranks = results[ranks, stage, True]
    for result in of_ranks:
        assert result["error"] < 1e-4 and result["behind"] == 0.0
        assert torch.equal(result["parameters"], of_ranks[0]["parameters"])
        assert torch.isfinite(result["parameters"]).all()
        for found in result["metrics"]:
            assert found["loss/trust_moves_back"] >= 1 and found["loss/trust_kl"] <= 0.01
        assert result["metrics"][1]["loss/trust_scale"] < result["metrics"][0]["loss/trust_scale"] < 1.0


def test_a_run_at_an_absurd_rate_trains_on(tmp_path: Path) -> None:
    """Two ranks, ZeRO-3. At a rate of .1 the first batch goes far too far; vLLM gets the weights that stay, or it would
    disagree later."""
    settings = {"algo": "ppo", "optim__lr": 0.1, "optim__warmup_ratio": 0.0, "optim__schedule": "constant"}
    run_dir = tmp_path / "run"
    more = {
        "update__trust_kl": 0.01,
        "update__steps": 3,
        "update__micro_batch_size": 4,
        "checkpoint__every": 2,
        "cluster__zero_stage": 3,
        "cluster__gpus_per_node": 2,
        "cluster__vllm_engines": 2,
    }
    done = train(run_dir, **settings, **more)
    assert done.returncode == 0, done.stderr
    lines = metrics(run_dir)[1:]
    assert lines[0]["loss/trust_moves_back"] >= 1 and lines[0]["loss/trust_kl_max"] > 1.0
    assert all(line["loss/trust_kl"] <= 0.01 for line in lines)
    assert all(line["rollout/mismatch_kl"] < 1e-2 for line in lines)
    events = read_jsonl(run_dir / "events.jsonl")
    moved = [line["step"] for line in lines if line["loss/trust_moves_back"]]
    assert [event["step"] for event in events if event["kind"] == "moved_back"] == moved
    state = json.loads((run_dir / "checkpoints" / "step_000003" / "state.json").read_text())
    assert state["trust"]["scale"] == pytest.approx(lines[-1]["loss/trust_scale"])
    resumed = train(run_dir, "--resume", **settings, **(more | {"update__steps": 4}))
    assert resumed.returncode == 0, resumed.stderr
    scales = [line["loss/trust_scale"] for line in metrics(run_dir)[1:]]
    assert len(scales) == 4 and scales[3] < 1.51 * scales[2] < 0.5  # not from 1 again
