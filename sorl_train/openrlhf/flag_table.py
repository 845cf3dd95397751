"""The flags of OpenRLHF 0.11.2 that a user may set, and those that follow from one setting.

OpenRLHF would accept its other flags, too, but they would do nothing, or train wrongly without an error: losses,
advantages, batches, rewards, prompts and logs are sorl's here, and ranks share no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_env.errors import did_you_mean

# Name: what it does. ``flags.openrlhf_flags`` sets some of them, which ``cluster.flags`` then replaces.
ALLOWED = {
    "actor.gradient_checkpointing_reentrant": "the other kind of gradient checkpointing",
    "ds.attn_implementation": "the attention kernel of the trainers; sdpa, torch's own, if it is not given",
    "ds.experts_implementation": "the kernel of a mixture of experts",
    "ds.grad_accum_dtype": "the dtype in which micro-batches are added up",
    "ds.overlap_comm": "communication during the backward pass",
    "ds.zpg": "ZeRO++: a second copy of the weights in each group of so many GPUs",
    "train.full_determinism_enable": "slower kernels that repeat exactly",
    "vllm.enable_prefix_caching": "keep the key-value cache of earlier turns",
    "vllm.enforce_eager": "no CUDA graphs",
    "vllm.sync_backend": "how weights travel to vLLM",
    "vllm.sync_with_ray": "the same, through Ray's collectives",
}

# Name: the setting whose value it takes as it is.
COPIED = {
    "train.seed": "seed",
    "train.max_epochs": "update.epochs",
    "train.batch_size": "update.mini_batch_size",
    "train.async_enable": "cluster.async_rollout",
    "train.partial_rollout_enable": "cluster.partial_rollout",
    "rollout.n_samples_per_prompt": "rollout.group_size",
    "rollout.temperature": "sampler.temperature",
    "rollout.top_p": "sampler.top_p",
    "eval.temperature": "eval.temperature",
    "ckpt.max_num": "checkpoint.keep",
    "algo.kl.init_coef": "loss.kl_coef",
    "algo.kl.estimator": "loss.kl_type",
    "ds.zero_stage": "cluster.zero_stage",
    "vllm.num_engines": "cluster.vllm_engines",
    "vllm.tensor_parallel_size": "cluster.vllm_tensor_parallel",
    "vllm.gpu_memory_utilization": "cluster.vllm_memory",
    "actor.gradient_checkpointing_enable": "hardware.gradient_checkpointing",
    "actor.adam.lr": "optim.lr",
    "critic.adam.lr": "optim.critic_lr",
    "actor.adam.eps": "optim.adam_eps",
    "critic.adam.eps": "optim.adam_eps",
    "actor.adam.weight_decay": "optim.weight_decay",
    "critic.adam.weight_decay": "optim.weight_decay",
}


def problems_of(flags: Mapping[str, Any]) -> list[str]:
    """One line for each flag of ``cluster.flags`` that cannot be used, with the next move; empty if all can be."""
    return [
        f"cluster.flags: {name} follows from a setting: use {COPIED[name]}"
        if name in COPIED
        else f"cluster.flags: {name} is not tuned by sorl, whose settings decide losses, batches and placement. "
        f"{did_you_mean(name, ALLOWED)}"
        for name in flags
        if name not in ALLOWED
    ]
