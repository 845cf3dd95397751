"""Optimizer steps of ``DeepSpeedCriticUpdate`` on a saved batch; a process for each rank.

    python deepspeed_critic.py FOLDER

reads FOLDER/cases.pt: the folder of a critic that the local engine saved, a batch, and a list of cases (config, ZeRO
stage, dtype, steps, whether the last rank's value head is to get a NaN). For each case rank 0 adds to
FOLDER/results.pt: the metrics of each step, the parameters after steps of plain SGD, the values before and after, what
was not finite, and whether head and optimizer came back from ``save``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from openrlhf.models import get_llm_for_sequence_regression

from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.means import Means
from sorl_train.learner.optimizer_step import NonFiniteError
from sorl_train.openrlhf.value_head import ValueHead
from sorl_train.openrlhf.workers import DeepSpeedCriticUpdate

LR = 1.0


def build_engine(folder: str, case: dict[str, Any], rows: int, config: TrainConfig) -> Any:
    """OpenRLHF's critic, loaded from a folder of the local engine's, in DeepSpeed."""
    model = get_llm_for_sequence_regression(folder, "critic", attn_implementation="sdpa")
    model = model.to(case["dtype"])
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": config.update.critic_micro_batch_size,
            "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": case["dtype"] == torch.bfloat16},
            "gradient_clipping": config.optim.max_grad_norm or 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine


def came_back(head: ValueHead, engine: Any, config: TrainConfig) -> bool:
    """Whether another head that loads what this one saves is the same, optimizer and all."""
    with tempfile.TemporaryDirectory() as folder:
        head.save(Path(folder))
        other = ValueHead(engine, config.optim)
        other.load(Path(folder))
    return _same(head.linear.state_dict(), other.linear.state_dict()) and _same(
        head.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    )


def _same(ours: dict[Any, Any], theirs: dict[Any, Any]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    pairs = [(ours[key], theirs[key]) for key in ours]
    return all(_same(a, b) if isinstance(a, dict) else torch.equal(a, b) for a, b in pairs)


def run(folder: str, batch: Batch, case: dict[str, Any]) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = case["config"]
    engine = build_engine(folder, case, len(batch), config)
    update = DeepSpeedCriticUpdate(engine, config)
    update.head.load(Path(folder))
    if case["sgd"]:
        update.head.optimizer = torch.optim.SGD(update.head.linear.parameters(), lr=LR)
    share = batch.rows(torch.argsort(batch.lengths, descending=True, stable=True)[rank::ranks])
    if case["poison"] and rank == ranks - 1:
        update.head.linear.weight.register_hook(lambda gradient: gradient * torch.nan)
    result: dict[str, Any] = {"metrics": [], "not_finite": None}
    with torch.no_grad():
        result["values"] = update.values(batch)
    try:
        for _ in range(case["steps"]):
            means = Means()
            update.step(share, LR if case["sgd"] else 1e-5, means)
            result["metrics"].append(means.result())
    except NonFiniteError as error:
        result["not_finite"] = error.what
    names = [(name, p) for name, p in engine.module.named_parameters() if not name.startswith("score")]
    with deepspeed.zero.GatheredParameters([p for _, p in names]):
        result["parameters"] = {name.removeprefix("model."): p.detach().float().clone() for name, p in names}
    result["head"] = {name: p.detach().clone() for name, p in update.head.linear.named_parameters()}
    result["came_back"] = case["sgd"] or came_back(update.head, engine, config)
    return result


def main(folder: Path) -> None:
    saved = torch.load(folder / "cases.pt", weights_only=False)
    deepspeed.init_distributed("gloo")
    results = [run(saved["critic"], saved["batch"], case) for case in saved["cases"]]
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
