"""One optimizer step of ``DeepSpeedPolicyUpdate`` on each of some saved batches; a process for each rank.

    python deepspeed_step.py FOLDER

reads FOLDER/cases.pt (a list; each case has config, model folder, batch, ZeRO stage, dtype, gradient clipping, and
whether the last rank's gradient is to be NaN), and rank 0 writes FOLDER/results.pt: for each case the metrics, the
parameters after a step of plain SGD, which show the gradient, and what was not finite.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from sorl_train.learner.means import Means
from sorl_train.learner.optimizer_step import NonFiniteError
from sorl_train.openrlhf.workers import DeepSpeedPolicyUpdate

LR = 1e3  # so large that the step shows the gradient to more digits than the weights have


def poison(model: Any) -> None:
    """From now on NaN in the gradients, and nothing else."""

    def hook(_: Any, __: Any, logits: Tensor) -> None:
        logits.register_hook(lambda gradient: gradient * torch.nan)

    model.get_output_embeddings().register_forward_hook(hook)


def main(folder: Path) -> None:
    cases = torch.load(folder / "cases.pt", weights_only=False)
    deepspeed.init_distributed("gloo")
    results = [step(case) for case in cases]
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")


def step(case: dict[str, Any]) -> dict[str, Any]:
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
    if case["poison"] and rank == ranks - 1:
        poison(model)
    means, not_finite = Means(), None
    update = DeepSpeedPolicyUpdate(engine, config)
    try:
        update.step(batch.rows(order[rank::ranks]), LR, means)
    except NonFiniteError as error:
        not_finite = error.what
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        parameters = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return {"metrics": means.result(), "parameters": parameters, "not_finite": not_finite}


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
