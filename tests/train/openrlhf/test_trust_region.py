"""The trust region on DeepSpeed's shards and in whole runs: weights that went too far are where they ought to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_train.learner.batch import Batch
from sorl_train.learner.means import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy
from sorl_train.run.files import read_jsonl

from ..learner.test_trust_region import batch as batch  # a fixture
from ..learner.test_trust_region import current
from .conftest import metrics, run_ranks, train
from .test_equivalence import settings

pytestmark = pytest.mark.openrlhf
SCRIPT = Path(__file__).with_name("deepspeed_trust.py")


def case_of(folder: str, batch: Batch, micro: int, **more: Any) -> dict[str, Any]:
    # four, three and one trajectory: DeepSpeed is started for four, and two ranks have fillers
    minis = [batch.rows(rows) for rows in (range(0, 8, 2), range(1, 7, 2), [7])] * 2
    config = settings(
        **{"update.trust_kl": 0.01, "update.micro_batch_size": micro, "loss.kl_coef": 0.0, "algo": "ppo"}
    )
    return {"model": folder, "config": config, "minis": minis, "sample": batch.rows(range(0, 9, 2)), **more}


def local(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, float]]]:
    """Weights before and after, and metrics, of the same updates by the local engine's class with plain SGD."""
    model = load_policy(case["model"])
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=case["lr"])
    update, found = PolicyUpdate(model, optimizer, case["config"]), []
    for rate in (case["lr"], 100 * case["lr"]):  # in the second batch the scale is small already
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
    return before, torch.cat([p.detach().flatten() for p in model.parameters()]), found


@pytest.mark.parametrize(
    ("ranks", "stage", "micro", "persistent"), [(1, 2, 4, 0), (2, 2, 1, 0), (1, 3, 2, 10**6), (2, 3, 1, 0)]
)
def test_moves_back_on_shards_equal_the_local_engines(
    ranks: int, stage: int, micro: int, persistent: int, tiny_folder: str, batch: Batch, tmp_path: Path
) -> None:
    """Plain SGD in float32 at a rate that leaves the region in each batch, over ranks and micro-batches."""
    case = case_of(tiny_folder, batch, micro, stage=stage, dtype=torch.float32, lr=30.0)
    before, after, expected = local(case)
    assert all(found["loss/trust_moves_back"] >= 1 for found in expected)
    torch.save(case | {"optimizer": "SGD", "params": {}, "persistent": persistent}, tmp_path / "case.pt")
    run_ranks(SCRIPT, tmp_path, ranks)
    for rank in range(ranks):
        result = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert result["error"] < 1e-4 and result["behind"] == 0.0
        for found, wanted in zip(result["metrics"], expected, strict=True):
            for name in (
                "trust_moves_back",
                "trust_scale",
                "trust_kl",
                "trust_kl_max",
                "approx_kl",
                "grad_norm",
            ):
                assert found[f"loss/{name}"] == pytest.approx(wanted[f"loss/{name}"], rel=2e-3), name
        distance = float((after - before).abs().max())
        torch.testing.assert_close(result["parameters"], after, atol=2e-3 * distance, rtol=0)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 3)])
def test_bfloat16_weights_follow_those_of_the_optimizer(
    ranks: int, stage: int, tiny_folder: str, batch: Batch, tmp_path: Path
) -> None:
    """Adam at a rate of .1: DeepSpeed's own reading of the float32 weights is what each rank computes with."""
    case = case_of(tiny_folder, batch, 2, stage=stage, dtype=torch.bfloat16, lr=0.1)
    torch_adam = {"optimizer": "AdamW", "params": {"torch_adam": True}}
    torch.save(case | torch_adam | {"persistent": 10**6}, tmp_path / "case.pt")
    run_ranks(SCRIPT, tmp_path, ranks)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
    for result in results:
        assert result["error"] < 1e-4 and result["behind"] == 0.0
        assert torch.equal(result["parameters"], results[0]["parameters"])
        assert torch.isfinite(result["parameters"]).all()
        for found in result["metrics"]:
            assert found["loss/trust_moves_back"] >= 1 and found["loss/trust_kl"] <= 0.01
        assert result["metrics"][1]["loss/trust_scale"] < result["metrics"][0]["loss/trust_scale"] < 1.0


@pytest.mark.parametrize(
    "cluster",
    [
        {"cluster__zero_stage": 2},
        {"cluster__zero_stage": 3, "cluster__gpus_per_node": 2, "cluster__vllm_engines": 2},
    ],
    ids=["zero 2", "zero 3 on two ranks"],
)
def test_a_run_at_an_absurd_rate_trains_on(cluster: dict[str, Any], tmp_path: Path) -> None:
    """At a rate of .1 the first batch goes far too far; vLLM gets the weights that stay, or it would disagree later."""
    settings = {"algo": "ppo", "optim__lr": 0.1, "optim__warmup_ratio": 0.0, "optim__schedule": "constant"}
    run_dir = tmp_path / "run"
    more = {
        "update__trust_kl": 0.01,
        "update__steps": 3,
        "update__micro_batch_size": 4,
        "checkpoint__every": 2,
    }
    done = train(run_dir, **settings, **more, **cluster)
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
    resumed = train(run_dir, "--resume", **settings, **(more | {"update__steps": 4}), **cluster)
    assert resumed.returncode == 0, resumed.stderr
    scales = [line["loss/trust_scale"] for line in metrics(run_dir)[1:]]
    assert len(scales) == 4 and scales[3] < 1.51 * scales[2] < 0.5  # not from 1 again
