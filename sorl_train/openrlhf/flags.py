"""The config as OpenRLHF's command line. Every flag that is set is made here, and ``--dry_run`` prints them all.

Some flags only steer OpenRLHF's own checks: what an advantage, a loss or a reward is, the classes of ``workers`` and
``trainers`` decide, from the same config as the local engine.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.task import Limits
from sorl_train.config.schema import flatten
from sorl_train.config.settings import TrainConfig
from sorl_train.openrlhf.flag_table import problems_of
from sorl_train.openrlhf.placement import Placement
from sorl_train.run.folder import RunDir

AGENT = Path(__file__).with_name("agent.py")


def openrlhf_flags(
    config: TrainConfig, run_dir: RunDir, model: str, limits: Limits, *, resume: Path | None
) -> dict[str, Any]:
    """Flags by name, without the dashes. True stands alone on the command line, a list gives several words.

    Args:
        resume: the folder of the checkpoint to go on from; None begins anew.
    """
    cluster, update, rollout, optim = config.cluster, config.update, config.rollout, config.optim
    place = Placement.of(config)
    on_cpu = config.hardware.device == "cpu"
    has_critic = config.algorithm.needs_critic
    flags: dict[str, Any] = {
        "actor.model_name_or_path": model,
        "train.agent_func_path": str(AGENT),
        "train.seed": config.seed,
        # one pass over our own loader, which holds every prompt of the run in its order
        "train.num_episodes": 1,
        "train.max_epochs": update.epochs,
        "train.batch_size": update.mini_batch_size,
        "train.micro_batch_size": place.micro_batch(update.micro_batch_size, update.mini_batch_size),
        "rollout.batch_size": rollout.batch_size // rollout.group_size,
        "rollout.n_samples_per_prompt": rollout.group_size,
        "rollout.micro_batch_size": place.micro_batch(update.log_prob_micro_batch_size, rollout.batch_size),
        "rollout.temperature": config.sampler.temperature,
        "rollout.top_p": config.sampler.top_p,
        "rollout.max_new_tokens": limits.max_new_tokens,
        "data.max_len": limits.max_trajectory_tokens,
        "eval.temperature": config.eval.temperature,
        "eval.n_samples_per_prompt": 1,
        "eval.steps": config.eval.every or -1,
        "ckpt.path": str(
            (resume or run_dir.checkpoints).absolute()
        ),  # OpenRLHF loads from there, and we save
        "ckpt.output_dir": str((run_dir.checkpoints / "final").absolute()),
        "ckpt.save_steps": config.checkpoint.every or -1,
        "ckpt.max_num": config.checkpoint.keep,
        "ckpt.best_metric_key": "none",  # ours is kept by the trainer, as a plain folder
        "ckpt.load_enable": resume is not None,
        # makes vLLM report the log-probabilities it drew with; the correction itself belongs to a loss we replace
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.estimator": "gae" if has_critic else "group_norm",
        "algo.kl.init_coef": config.loss.kl_coef,
        "algo.kl.estimator": config.loss.kl_type,
        "algo.kl.use_loss": config.loss.kl_in == "loss" and config.loss.kl_coef > 0,
        "ds.zero_stage": cluster.zero_stage,
        "ds.param_dtype": "bf16",
        "ds.attn_implementation": "sdpa" if on_cpu else "flash_attention_2",
        "ds.adam_offload": cluster.offload_optimizer and not on_cpu,
        "ds.enable_sleep": place.shared and not on_cpu,
        "ref.offload": cluster.offload_reference and not on_cpu,
        "actor.gradient_checkpointing_enable": config.hardware.gradient_checkpointing,
        "vllm.num_engines": cluster.vllm_engines,
        "vllm.tensor_parallel_size": cluster.vllm_tensor_parallel,
        "vllm.gpu_memory_utilization": cluster.vllm_memory,
        "vllm.enable_prefix_caching": True,
        "vllm.enable_sleep": place.shared and not on_cpu,
        "vllm.enforce_eager": on_cpu,
        "vllm.sync_backend": "gloo" if on_cpu else "nccl",
        "train.colocate_all": True,
        "train.async_enable": cluster.async_rollout,
        "train.async_queue_size": max(1, rollout.max_staleness),
        "train.partial_rollout_enable": cluster.partial_rollout,
    }
    for role in ("actor", "ref", "critic", "reward"):
        flags[f"{role}.num_nodes"] = place.train_nodes
        flags[f"{role}.num_gpus_per_node"] = place.train_gpus_per_node
    for role, rate in (("actor", optim.lr), ("critic", optim.critic_lr)):
        flags[f"{role}.adam.lr"] = rate
        flags[f"{role}.adam.betas"] = [optim.beta1, optim.beta2]
        flags[f"{role}.adam.eps"] = optim.adam_eps
        flags[f"{role}.adam.weight_decay"] = optim.weight_decay
        flags[f"{role}.max_norm"] = optim.max_grad_norm or 0.0
        flags[f"{role}.lr_scheduler"] = "constant"  # the rate of each step is set by ours, schedule included
    if has_critic:
        flags["critic.model_name_or_path"] = config.critic or model
    return flags | config.cluster.flags


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


# Settings that the local engine reads and this one does not, and what counts here.
UNREAD = {
    "sampler.backend": "vLLM samples",
    "sampler.max_concurrency": "all trajectories of a step are in flight at once",
    "sampler.gpu_memory": "cluster.vllm_memory",
    "update.critic_micro_batch_size": "update.micro_batch_size, for policy and critic",
    "hardware.threads": "the environment variable OMP_NUM_THREADS",
}


def unread(config: TrainConfig) -> list[str]:
    """A line for each setting that was changed and has no effect with this engine."""
    here, default = flatten(config), flatten(TrainConfig())
    return [
        f"{name}={here[name]} has no effect with engine=openrlhf; here counts: {instead}"
        for name, instead in UNREAD.items()
        if here[name] != default[name]
    ]


def critic_start(config: TrainConfig, model: str) -> str:
    """A line that says where the critic's weights and its value head come from."""
    from sorl_train.models.critic import VALUE_HEAD_FILE

    start = config.critic or model
    if (Path(start) / VALUE_HEAD_FILE).is_file():
        return f"critic: starts from {start} and the value head that is kept there ({VALUE_HEAD_FILE})"
    return f"critic: starts from {start} with a value head of zeros, as there is no {VALUE_HEAD_FILE}: all values are 0"


def check(config: TrainConfig) -> None:
    """Raise ``UserError`` for what this engine cannot do with a config that is valid in itself."""
    problems = list(_problems(config))
    if problems:
        raise UserError("engine: openrlhf\n" + "\n".join(f"  - {problem}" for problem in problems))


def _problems(config: TrainConfig) -> list[str]:
    cluster, update, loss = config.cluster, config.update, config.loss
    problems = problems_of(cluster.flags)
    if config.stage != "rl":
        problems.append("stage: sft runs on engine=local")
    if loss.clip_bias_norm == "gradient":
        problems.append(
            "loss.clip_bias_norm=gradient needs a second backward pass, which DeepSpeed would add to the first: use "
            "logit, which is exact in logit space"
        )
    if config.lora.rank:
        problems.append("lora.rank is for engine=local")
    if config.hardware.dtype == "float32":
        problems.append(
            "hardware.dtype=float32 is for engine=local: OpenRLHF trains in bfloat16, leave it at auto"
        )
    if config.hardware.device not in ("auto", "cpu", "cuda"):
        problems.append(
            f"hardware.device={config.hardware.device} names one GPU: Ray places the processes, choose the GPUs with "
            "CUDA_VISIBLE_DEVICES and cluster.gpus_per_node"
        )
    if cluster.zero_stage not in (2, 3):
        problems.append(f"cluster.zero_stage is 2 or 3, not {cluster.zero_stage}")
    if cluster.partial_rollout and not cluster.async_rollout:
        problems.append("cluster.partial_rollout needs cluster.async_rollout")
    if config.alarm.action == "roll_back":
        problems.append(
            "alarm.action=roll_back is for engine=local: use stop, then --resume with a lower rate"
        )
    if cluster.async_rollout and (config.eval.patience or config.alarm.action == "stop"):
        problems.append("eval.patience and alarm.action=stop end synchronous runs only: use 0 and warn")
    if cluster.async_rollout and config.sampler.top_p < 1:
        problems.append(
            f"sampler.top_p={config.sampler.top_p:g} does not go with cluster.async_rollout, which takes ratios to the "
            "log-probabilities that vLLM drew with: top_p makes those larger than the policy's own, and every ratio "
            "too small by the same factor. Use sampler.top_p=1"
        )
    if cluster.async_rollout and config.rollout.max_staleness < 1:
        problems.append(
            "cluster.async_rollout trains on older samples: set rollout.max_staleness to 1 or more"
        )
    if not cluster.async_rollout and config.rollout.max_staleness:
        problems.append("rollout.max_staleness needs cluster.async_rollout with this engine")
    try:
        ranks = Placement.of(config).ranks
    except UserError as error:
        return [*problems, str(error)]
    if update.mini_batch_size % ranks:
        problems.append(f"update.mini_batch_size {update.mini_batch_size} does not divide over {ranks} GPUs")
    elif config.rollout.batch_size < ranks or math.gcd(config.rollout.batch_size, ranks) != ranks:
        problems.append(f"rollout.batch_size {config.rollout.batch_size} does not divide over {ranks} GPUs")
    return problems
