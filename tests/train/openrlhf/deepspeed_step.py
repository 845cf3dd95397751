"""One optimizer step of ``DeepSpeedPolicyUpdate`` on a saved batch; a process for each rank.

    python deepspeed_step.py FOLDER

reads FOLDER/case.pt (config, model folder, batch, ZeRO stage, dtype, gradient clipping), and rank 0 writes
FOLDER/result.pt: the metrics and the parameters after a step of plain SGD, which show the gradient.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from sorl_train.engines.openrlhf.workers import DeepSpeedPolicyUpdate
from sorl_train.update import Means

LR = 1e3  # so large that the step shows the gradient to more digits than the weights have


def main(folder: Path) -> None:
    case = torch.load(folder / "case.pt", weights_only=False)
    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config, batch = case["config"], case["batch"]
    half = case["dtype"] == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=case["dtype"], attn_implementation="sdpa"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_batch_size": len(batch),
            "train_micro_batch_size_per_gpu": config.update.micro_batch_size,
            "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": half},
            "gradient_clipping": case["max_grad_norm"],
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_allow_untested_optimizer": True,
        },
    )
    order = torch.argsort(batch.lengths, descending=True, stable=True)
    means = Means()
    update = DeepSpeedPolicyUpdate(engine, config)
    update.step(batch.rows(order[rank::ranks]), LR, means)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    if rank == 0:
        torch.save({"metrics": means.result(), "parameters": parameters}, folder / "result.pt")


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
