"""Updates of the workers' classes on DeepSpeed engines, from saved cases; a process for each rank.

    python deepspeed_cases.py FOLDER

reads FOLDER/cases.pt, a list of cases. Each names a function of this file (``kind``), the folder of a model, a config,
ZeRO stage and dtype, and what the function takes. Each rank writes what they return to FOLDER/rank{R}.pt.
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
from deepspeed.utils import safe_get_full_fp32_param
from openrlhf.models import get_llm_for_sequence_regression
from torch import Tensor
from transformers import AutoModelForCausalLM

from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch, by_rank
from sorl_train.learner.optimizer_step import Means, NonFiniteError
from sorl_train.learner.trust_region import MOST_MOVES, TrustRegion
from sorl_train.learner.update import PolicyUpdate
from sorl_train.openrlhf.deepspeed_backend import ValueHead
from sorl_train.openrlhf.workers import critic_update, policy_update

Case = dict[str, Any]


def engine_of(case: Case, rows: int, micro_batch: int) -> Any:
    """The policy or, for the kind ``critic``, OpenRLHF's critic in DeepSpeed; plain SGD by default."""
    if case["kind"] == "critic":
        model = get_llm_for_sequence_regression(case["model"], "critic", attn_implementation="sdpa")
        model = model.to(case["dtype"])
    else:
        model = AutoModelForCausalLM.from_pretrained(
            case["model"], dtype=case["dtype"], attn_implementation="sdpa"
        )
    persistent = case.get("persistent", 0)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": micro_batch,
            "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": persistent},
            "bf16": {"enabled": case["dtype"] == torch.bfloat16},
            "gradient_clipping": case["config"].optim.max_grad_norm or 0.0,
            "optimizer": case.get("optimizer", {"type": "SGD", "params": {"lr": case["lr"]}}),
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine


def share_of(batch: Batch) -> Batch:
    """This rank's share."""
    return by_rank(batch, dist.get_world_size())[dist.get_rank()]


def is_poisoned(case: Case) -> bool:
    """Whether the gradients of this rank, the last one, are to be NaN."""
    return bool(case.get("poison")) and dist.get_rank() == dist.get_world_size() - 1


# -- one step of the policy -------------------------------------------------------------------------------------------


def policy(case: Case) -> Case:
    """Metrics of the steps, the parameters after them, and what was not finite."""
    config, batch = case["config"], case["batch"]
    engine = engine_of(case, len(batch), config.update.micro_batch_size)
    if is_poisoned(case):
        engine.module.get_output_embeddings().register_forward_hook(_poison)
    means, not_finite = Means(), None
    try:
        update = policy_update(engine, config)
        for _ in range(case.get("steps", 1)):
            update.step(share_of(batch), case["lr"], means)
    except NonFiniteError as error:
        not_finite = error.what
    return {"metrics": means.result(), "parameters": parameters_of(engine), "not_finite": not_finite}


def _poison(_: Any, __: Any, logits: Tensor) -> None:
    """From now on NaN in the gradients, and nothing else."""
    logits.register_hook(lambda gradient: gradient * torch.nan)


def parameters_of(engine: Any) -> Tensor:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([p.detach().float().flatten() for p in parameters])


# -- steps of the critic ----------------------------------------------------------------------------------------------


def critic(case: Case) -> Case:
    """Metrics of the steps, parameters after them, values before, and whether head and optimizer came back."""
    config, batch = case["config"], case["batch"]
    engine = engine_of(case, len(batch), config.update.critic_micro_batch_size)
    update, head = critic_update(engine, config)
    head.load(Path(case["model"]))
    if case["sgd"]:
        head.optimizer = torch.optim.SGD(head.linear.parameters(), lr=case["lr"])
    if is_poisoned(case):
        head.linear.weight.register_hook(lambda gradient: gradient * torch.nan)
    result: Case = {"metrics": [], "not_finite": None}
    with torch.no_grad():
        result["values"] = update.backend.values(batch, batch.action_mask)
    try:
        for _ in range(case["steps"]):
            means = Means()
            update.step(share_of(batch), case["lr"] if case["sgd"] else 1e-5, means)
            result["metrics"].append(means.result())
    except NonFiniteError as error:
        result["not_finite"] = error.what
    names = [(name, p) for name, p in engine.module.named_parameters() if not name.startswith("score")]
    with deepspeed.zero.GatheredParameters([p for _, p in names]):
        result["parameters"] = {name.removeprefix("model."): p.detach().float().clone() for name, p in names}
    result["head"] = {name: p.detach().clone() for name, p in head.linear.named_parameters()}
    result["came_back"] = case["sgd"] or came_back(head, engine, config)
    return result


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


# -- training steps that leave the trust region -----------------------------------------------------------------------


class Checked(TrustRegion):
    """A trust region that compares each of its moves with numbers of its own."""

    error = 0.0  # over the distance from the batch's start

    def begin(self) -> None:
        super().begin()
        self.at_start = [w.detach().clone().cpu() for w in self._weights()]

    def go_back(self, kl: float) -> None:
        before = [w.detach().clone().cpu() for w in self._weights()]
        share = (self.limit / 2 / kl) ** 0.5 if self._in_a_row < MOST_MOVES else 0.0
        super().go_back(kl)
        for start, there, now in zip(self.at_start, before, self._weights(), strict=True):
            distance = float((there - start).abs().max()) if start.numel() else 0.0
            wrong = (now.detach().cpu() - (start + share * (there - start))).abs()
            if distance:
                self.error = max(self.error, float(wrong.max()) / distance)


def trust(case: Case) -> Case:
    """Two training steps, the second at a hundred times the rate: metrics of each, the weights of the forward pass, the
    largest error of a move back against the interpolation by hand, and of these weights against the optimizer's."""
    config = case["config"]
    engine = engine_of(case, len(case["minis"][0]), config.update.micro_batch_size)
    update = policy_update(engine, config)
    update.trust = region = Checked(
        update.backend.weights, config.update.trust_kl, config.update.trust_max_scale
    )
    found, behind = [], 0.0
    for rate in (case["lr"], 100 * case["lr"]):  # in the second batch the scale is small already
        means = Means()
        engine.eval()
        *minis, sample = (from_here(update, part) for part in (*case["minis"], case["sample"]))
        engine.train()
        update.begin_batch()
        for mini in minis:
            update.step(share_of(mini), rate, means)
        update.end_batch(share_of(sample), means)
        found.append(means.result())
        for p in engine.module.parameters():
            whole = safe_get_full_fp32_param(p).cpu()
            with deepspeed.zero.GatheredParameters([p]):
                behind = max(behind, float((p.detach().cpu() - whole.to(p.dtype)).abs().max()))
    return {"metrics": found, "parameters": parameters_of(engine), "error": region.error, "behind": behind}


@torch.no_grad()
def from_here(update: PolicyUpdate, batch: Batch) -> Batch:
    """The batch as an update gets it that begins with these weights; all ranks compute all rows."""
    return batch.with_fields(
        start_log_probs=update.backend.log_probs(batch, batch.loss_mask).log_probs.float()
    )


def main(folder: Path) -> None:
    cases = torch.load(folder / "cases.pt", weights_only=False)
    deepspeed.init_distributed("gloo")
    results = [{"policy": policy, "critic": critic, "trust": trust}[case["kind"]](case) for case in cases]
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
