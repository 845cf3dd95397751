"""Bytes of tensors that policy and critic hold at once in their updates and in scoring; a process for each rank.

    python deepspeed_memory.py FOLDER

reads FOLDER/case.json (the model's sizes, rows, lengths, ZeRO stage, ..), and rank 0 writes FOLDER/result.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from openrlhf.models.model import _get_critic_model
from openrlhf.utils.deepspeed.deepspeed_utils import get_optimizer_grouped_parameters, get_train_ds_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel

from sorl_train.config.run_settings import HardwareConfig
from sorl_train.config.settings import TrainConfig, UpdateConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import Means
from sorl_train.openrlhf.workers import critic_update, policy_update

STEPS = 2  # Adam's moments are there from the second one on


class Held(TorchDispatchMode):
    """Counts each storage from the operation that makes it until it is freed.

    Chosen over the process's resident memory, which also holds libraries and freed blocks and lacks memory that was
    never touched; and over the profiler, which misses what the threads of communication free, so that its sum drifts.
    Memory that a kernel takes and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # of indexing's backward pass: in place when nobody watches
        if func is torch.ops.aten.index_put.default:
            func = torch.ops.aten.index_put_.default
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)

    def restart(self) -> int:
        """The peak since the last call, and begin anew."""
        peak, self.peak = self.peak, self.now
        return peak


def build_engine(case: dict[str, Any], model_class: Any) -> Any:
    """A Llama with random weights in DeepSpeed, configured as OpenRLHF does."""
    shape = LlamaConfig(
        vocab_size=case["vocabulary"],
        hidden_size=case["hidden"],
        intermediate_size=case["intermediate"],
        num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["heads"],
        attn_implementation="sdpa",
        use_cache=False,
        normalize_reward=False,
    )
    adam = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    fused = {"torch_adam": True, "fused": True}  # in one pass, as DeepSpeed's own on a GPU and for offloading
    config = get_train_ds_config(
        offload=False,
        adam_offload=case["offload"],
        stage=case["stage"],
        zpg=1,
        optim_config={"type": "AdamW", "params": adam | fused},
    )
    config["zero_optimization"]["reduce_bucket_size"] = case["bucket"]
    config["zero_force_ds_cpu_optimizer"] = False
    config["train_micro_batch_size_per_gpu"] = case["micro"]
    config["train_batch_size"] = case["rows"] * dist.get_world_size()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=case["stage"] == 3):
        model = model_class(shape)
    model = model.to(torch.bfloat16).train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = get_optimizer_grouped_parameters(model, 0.0)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


def made_up_batch(case: dict[str, Any]) -> Batch:
    """Trajectories of full length: a prompt, then one turn of ``actions`` tokens."""
    rows, columns = case["rows"], case["tokens"] - 1
    mask = torch.zeros((rows, columns), dtype=torch.bool)
    mask[:, columns - case["actions"] :] = True
    zeros = torch.zeros((rows, columns))
    return Batch(
        token_ids=torch.randint(0, case["vocabulary"], (rows, case["tokens"])),
        lengths=torch.full((rows,), case["tokens"]),
        action_mask=mask,
        loss_mask=mask,
        turn_ids=mask.long() - 1,
        rollout_log_probs=zeros,
        rewards=torch.zeros(rows),
        token_rewards=zeros,
        included=torch.ones(rows, dtype=torch.bool),
        group_ids=torch.arange(rows),
        ids=tuple(str(row) for row in range(rows)),
        advantages=torch.randn((rows, columns)),
        returns=torch.randn((rows, columns)),
    )


def measure(held: Held, role: str, case: dict[str, Any], batch: Batch) -> dict[str, int]:
    """What one model adds to what was held before it: between steps, and at most."""
    config = TrainConfig(
        update=UpdateConfig(micro_batch_size=case["micro"], critic_micro_batch_size=case["micro"]),
        hardware=HardwareConfig(device="cpu"),
    )
    before = held.now
    if role == "policy":
        engine = build_engine(case, LlamaForCausalLM)
        update = policy_update(engine, config)
    else:
        engine = build_engine(case, _get_critic_model(LlamaPreTrainedModel, LlamaModel))
        update, _ = critic_update(engine, config)
    for _ in range(STEPS):
        gc.collect()
        held.restart()
        update.step(batch, 1e-4, Means())
    found = {f"{role} update": held.restart() - before}
    gc.collect()
    found[f"{role} between steps"] = held.now - before
    engine.module.eval()
    held.restart()
    with torch.no_grad():
        for _, micro in batch.micro_batches(case["micro"]):
            if role == "policy":
                update.backend.log_probs(micro, micro.action_mask)
            else:
                update.backend.values(micro, micro.action_mask)
    found[f"scoring, {role}"] = held.restart() - before
    found[f"{role} parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    return found


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    batch = made_up_batch(case)
    with Held() as held:
        result = {"policy": measure(held, "policy", case, batch)}
        result["critic"] = measure(held, "critic", case, batch)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result["policy"] | result["critic"]))


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", "0")
    main(Path(sys.argv[1]))
