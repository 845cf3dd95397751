"""Training steps of ``DeepSpeedPolicyUpdate`` whose optimizer steps leave the trust region; a process for each rank.

    python deepspeed_trust.py FOLDER

reads FOLDER/case.pt (config, model folder, mini-batches, the sample of the last KL, learning rate, ZeRO stage, dtype),
trains on the mini-batches twice, the second time at a hundred times the rate, and each rank writes FOLDER/rank{R}.pt:
the metrics, the weights of its forward pass, the largest error of a move back against the interpolation computed by
hand, and of the forward pass's weights against the optimizer's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor
from transformers import AutoModelForCausalLM

from sorl_train.learner.batch import Batch
from sorl_train.learner.means import Means
from sorl_train.learner.trust_region import MOST_MOVES, TrustRegion
from sorl_train.openrlhf.shares import by_rank
from sorl_train.openrlhf.workers import DeepSpeedPolicyUpdate


class Checked(TrustRegion):
    """A trust region that compares each of its moves with numbers of its own."""

    error = 0.0  # over the distance from the batch's start

    def begin(self, weights: Sequence[Tensor]) -> None:
        super().begin(weights)
        self.at_start = [w.detach().clone().cpu() for w in weights]

    def go_back(self, weights: Sequence[Tensor], kl: float, move: int) -> None:
        before = [w.detach().clone().cpu() for w in weights]
        super().go_back(weights, kl, move)
        share = (self.limit / 2 / kl) ** 0.5 if move < MOST_MOVES else 0.0
        for start, there, now in zip(self.at_start, before, weights, strict=True):
            distance = float((there - start).abs().max()) if start.numel() else 0.0
            wrong = (now.detach().cpu() - (start + share * (there - start))).abs()
            if distance:
                self.error = max(self.error, float(wrong.max()) / distance)


@torch.no_grad()
def from_here(update: DeepSpeedPolicyUpdate, batch: Batch) -> Batch:
    """The batch as an update gets it that begins with these weights; all ranks compute all rows."""
    return batch.with_fields(start_log_probs=update.stats(batch, batch.loss_mask).log_probs.float())


def main(folder: Path) -> None:
    case = torch.load(folder / "case.pt", weights_only=False)
    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config, lr = case["config"], case["lr"]
    model = AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=case["dtype"], attn_implementation="sdpa"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_batch_size": len(case["minis"][0]),
            "train_micro_batch_size_per_gpu": config.update.micro_batch_size,
            "zero_optimization": {
                "stage": case["stage"],
                "stage3_param_persistence_threshold": case["persistent"],
            },
            "bf16": {"enabled": case["dtype"] == torch.bfloat16},
            # DeepSpeed would compile an Adam of its own
            "optimizer": {"type": case["optimizer"], "params": {"lr": lr} | case["params"]},
            "zero_allow_untested_optimizer": True,
        },
    )
    update = DeepSpeedPolicyUpdate(engine, config)
    update.trust = trust = Checked(config.update.trust_kl, config.update.trust_max_scale)
    found, behind = [], 0.0
    for rate in (lr, 100 * lr):  # in the second batch the scale is small already
        means = Means()
        engine.eval()
        *minis, sample = (from_here(update, part) for part in (*case["minis"], case["sample"]))
        engine.train()
        update.begin_batch()
        for mini in minis:
            update.step(by_rank(mini, ranks)[rank], rate, means)
        update.end_batch(by_rank(sample, ranks)[rank], means)
        found.append(means.result())
        for p in model.parameters():
            whole = safe_get_full_fp32_param(p).cpu()
            with deepspeed.zero.GatheredParameters([p]):
                behind = max(behind, float((p.detach().cpu() - whole.to(p.dtype)).abs().max()))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    result = {"metrics": found, "parameters": parameters, "error": trust.error, "behind": behind}
    torch.save(result, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
