"""The config as OpenRLHF's command line. All flags are set here, and ``--dry_run`` prints them.

Some only pass OpenRLHF's own checks: the classes of ``workers`` and ``trainers`` decide what an advantage, a loss or a
reward is, from the same config as the local engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_env.task import Limits
from sorl_train.config.run_settings import ClusterConfig
from sorl_train.config.schema import flatten
from sorl_train.config.settings import TrainConfig
from sorl_train.run.folder import RunDir

AGENT = Path(__file__).with_name("agent.py")

# The flags of OpenRLHF 0.11.2 that a user may set in ``cluster.flags``, and what they do. It would accept its other
# flags, too, but they would do nothing, or train wrongly without an error: losses, advantages, batches, rewards,
# prompts and logs are sorl's here, and ranks share no rows.
ALLOWED = {
    "actor.gradient_checkpointing_reentrant": "the other kind of gradient checkpointing",
    "ds.attn_implementation": "the attention kernel of the trainers; sdpa, torch's own, if it is not given",
    "ds.experts_implementation": "the kernel of a mixture of experts",
    "ds.grad_accum_dtype": "the dtype in which micro-batches are added up",
    "ds.overlap_comm": "communication during the backward pass",
    "ds.zpg": "ZeRO++: a second copy of the weights in each group of this many GPUs",
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


@dataclass(frozen=True)
class Placement:
    """Which GPUs train and which sample."""

    train_nodes: int
    train_gpus_per_node: int
    sample_gpus: int
    shared: bool  # the same GPUs train and sample in turns; otherwise vLLM has its own (asynchronous rollout)

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Placement:
        """The placement that the settings ask for; ``UserError`` if the GPUs cannot be divided so."""
        total = cluster.nodes * cluster.gpus_per_node
        sample = cluster.vllm_engines * cluster.vllm_tensor_parallel
        engines = f"{cluster.vllm_engines} vLLM engines of {cluster.vllm_tensor_parallel} GPUs"
        gpus = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs"
        if not cluster.async_rollout:
            if sample != total:
                raise UserError(
                    f"{engines} take {sample} GPUs, but {gpus} are {total}. Training and sampling share the GPUs, so "
                    "cluster.vllm_engines x cluster.vllm_tensor_parallel has to be all of them"
                )
            return cls(cluster.nodes, cluster.gpus_per_node, sample, shared=True)
        left = total - sample
        if left < 1 or left % cluster.nodes:
            raise UserError(
                f"{engines} of their own leave {left} of {gpus} for training, which cannot be the same number on each "
                "node: change cluster.vllm_engines or cluster.vllm_tensor_parallel"
            )
        return cls(cluster.nodes, left // cluster.nodes, sample, shared=False)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the trainer."""
        return self.train_nodes * self.train_gpus_per_node

    @property
    def gpus(self) -> int:
        """All GPUs of the run."""
        return self.ranks if self.shared else self.ranks + self.sample_gpus

    def micro_batch(self, wanted: int, batch: int) -> int:
        """The largest micro-batch of at most ``wanted`` rows that divides a rank's share of ``batch``."""
        share = max(1, batch // self.ranks)
        return next(size for size in range(min(wanted, share), 0, -1) if share % size == 0)


def openrlhf_flags(
    config: TrainConfig, run_dir: RunDir, model: str, limits: Limits, *, resume: Path | None
) -> dict[str, Any]:
    """Flags by name, without the dashes. True stands alone on the command line, a list gives several words.

    ``resume`` is the folder of the checkpoint to go on from; None: the run begins anew.
    """
    cluster, update, rollout, optim = config.cluster, config.update, config.rollout, config.optim
    place = Placement.of(config.cluster)
    on_gpu = config.hardware.device != "cpu"
    has_critic = config.algorithm.needs_critic
    settings = flatten(config)
    flags = {name: settings[setting] for name, setting in COPIED.items()}
    flags["algo.kl.estimator"] = str(config.loss.kl_type).removesuffix("_unbiased")  # the loss is our own
    flags |= {
        "actor.model_name_or_path": _everywhere(model),
        "train.agent_func_path": str(AGENT),
        "train.num_episodes": 1,  # one pass over our own loader, which has every prompt of the run in its order
        "train.micro_batch_size": place.micro_batch(update.micro_batch_size, update.mini_batch_size),
        "train.colocate_all": True,
        "train.async_queue_size": max(1, rollout.max_staleness),
        "rollout.batch_size": rollout.batch_size // rollout.group_size,
        "rollout.micro_batch_size": place.micro_batch(update.log_prob_micro_batch_size, rollout.batch_size),
        "rollout.max_new_tokens": limits.max_new_tokens,
        "data.max_len": limits.max_trajectory_tokens,
        "eval.n_samples_per_prompt": 1,
        "eval.steps": config.eval.every or -1,
        # OpenRLHF loads from there, the recorder saves
        "ckpt.path": str((resume or run_dir.checkpoints).absolute()),
        "ckpt.output_dir": str((run_dir.checkpoints / "final").absolute()),
        "ckpt.save_steps": config.checkpoint.every or -1,
        "ckpt.best_metric_key": "none",  # the recorder keeps the best policy
        "ckpt.load_enable": resume is not None,
        # lets vLLM report the log-probabilities it sampled with; the correction is part of a loss that we replace
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.estimator": "gae" if has_critic else "group_norm",
        "algo.kl.use_loss": config.loss.kl_in == "loss" and config.loss.kl_coef > 0,
        "ds.param_dtype": "bf16",
        "ds.attn_implementation": "sdpa",
        "ds.adam_offload": cluster.offload_optimizer and on_gpu,
        "ds.enable_sleep": place.shared and on_gpu,
        "ref.offload": cluster.offload_reference and on_gpu,
        "vllm.enable_prefix_caching": True,
        "vllm.enable_sleep": place.shared and on_gpu,
        "vllm.enforce_eager": not on_gpu,
        "vllm.sync_backend": "nccl" if on_gpu else "gloo",
    }
    for role in ("actor", "ref", "critic", "reward"):
        flags[f"{role}.num_nodes"] = place.train_nodes
        flags[f"{role}.num_gpus_per_node"] = place.train_gpus_per_node
    for role in ("actor", "critic"):
        flags[f"{role}.adam.betas"] = [optim.beta1, optim.beta2]
        flags[f"{role}.max_norm"] = optim.max_grad_norm or 0.0
        flags[f"{role}.lr_scheduler"] = "constant"  # our update sets the rate of each step, schedule included
    if has_critic:
        flags["critic.model_name_or_path"] = _everywhere(config.critic or model)
    return flags | cluster.flags


def _everywhere(model: str) -> str:
    """A folder as an absolute path, because Ray's workers need not start in this folder; a hub name as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def as_arguments(flags: dict[str, Any]) -> list[str]:
    """The words of the command line."""
    words = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        words.extend(repr(part) if isinstance(part, float) else str(part) for part in parts)
    return words


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
