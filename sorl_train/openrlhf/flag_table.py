"""Every flag of OpenRLHF 0.11.2, and who decides its value.

A user may set the flags of ``ALLOWED`` in ``cluster.flags``: they tune how OpenRLHF runs. Those of ``OURS`` follow from
the run's settings. OpenRLHF would accept those of ``REFUSED`` too, but they would do nothing, or train wrongly without
an error, because losses, advantages, batches, rewards, prompts and logs are sorl's here. A test compares the three
tables with the parser of the installed OpenRLHF: each of its flags is in exactly one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_env.errors import did_you_mean


def _each(groups: str, names: str, text: str) -> dict[str, str]:
    """The same text for each flag ``GROUP.NAME`` of the words in ``groups`` and ``names``."""
    return {f"{group}.{name}": text for group in groups.split() for name in names.split()}


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
    **_each("actor critic", "adam.eps", "optim.adam_eps"),
    **_each("actor critic", "adam.weight_decay", "optim.weight_decay"),
}

# Name: the setting to use in its place.
OURS = {
    **COPIED,
    "actor.model_name_or_path": "model",
    "critic.model_name_or_path": "critic",
    "train.micro_batch_size": "update.micro_batch_size",
    "train.async_queue_size": "rollout.max_staleness",
    "rollout.batch_size": "rollout.batch_size (in trajectories)",
    "rollout.micro_batch_size": "update.log_prob_micro_batch_size",
    "rollout.max_new_tokens": "limits.max_new_tokens",
    "data.max_len": "limits.max_trajectory_tokens",
    "eval.steps": "eval.every",
    "ckpt.path": "run_dir",
    "ckpt.output_dir": "run_dir",
    "ckpt.save_steps": "checkpoint.every",
    "ckpt.load_enable": "--resume",
    "algo.advantage.estimator": "algo",
    "algo.kl.use_loss": "loss.kl_in",
    "ds.param_dtype": "hardware.dtype (this engine trains in bfloat16)",
    "ds.adam_offload": "cluster.offload_optimizer",
    "ds.enable_sleep": "cluster.async_rollout (shared GPUs sleep in turns)",
    "ref.offload": "cluster.offload_reference",
    "vllm.enable_sleep": "cluster.async_rollout (shared GPUs sleep in turns)",
    **_each("actor ref critic reward", "num_nodes", "cluster.nodes"),
    **_each("actor ref critic reward", "num_gpus_per_node", "cluster.gpus_per_node"),
    **_each("actor critic", "adam.betas", "optim.beta1 and optim.beta2"),
    **_each("actor critic", "max_norm", "optim.max_grad_norm"),
    **_each("actor critic", "lr_scheduler", "optim.schedule"),
}

_RANKS = (
    "the training step gives every process rows of its own, so processes that are to share rows would train on "
    "different ones as if they were the same"
)
_BATCHES = (
    "the training step makes its own micro-batches, padded on the right, of update.micro_batch_size rows"
)
_LORA = "this engine trains the whole model and sends it to vLLM; LoRA needs engine=local"
_MUON = "sorl's learning rates and normalization are made for AdamW"
_RATE = "the rate of each step is set by optim.schedule, optim.warmup_ratio and optim.critic_warmup_ratio"
_LOSS = "the loss is sorl's; use {}"
_ADVANTAGE = "advantages are sorl's; use {}"
_REWARD = "rewards come from the task"
_PROMPTS = "prompts come from the task; use {}"
_LOGS = "metrics are logged by sorl; use {}"
_EMA = "only OpenRLHF's own training step updates the average, so it would never change"
_VISION = "the environments have no images"
_FILTER = "sampling returns whole trajectories, without the scores to filter by"
_FIXED = "the engine works with one value only, which it sets"

# Name: why it is refused.
REFUSED = {
    "ds.ring_attn_size": _RANKS,
    "ds.ring_attn_head_stride": _RANKS,
    "ds.tensor_parallel_size": _RANKS,
    "ds.packing_samples": _BATCHES,
    "train.dynamic_batch_enable": _BATCHES,
    "train.max_tokens_per_gpu": _BATCHES,
    "rollout.max_tokens_per_gpu": _BATCHES,
    "rollout.vllm_generate_batch_size": "samples beyond those of a step would wait where no checkpoint keeps them",
    "ds.deepcompile": "it reduces gradients in compiled code, where they can be neither scaled nor checked",
    "ds.use_liger_kernel": "it replaces the model's forward pass, whose logits the training step needs",
    "ds.use_universal_ckpt": "a resume reads the shards that the run wrote",
    "ds.value_head_prefix": "the value head is sorl's, in float32",
    "ds.load_in_4bit": _LORA,
    **_each("ds.lora", "rank alpha target_modules dropout", _LORA),
    "local_rank": "Ray gives each process its GPU",
    "train.num_episodes": _FIXED,
    "train.agent_func_path": _FIXED,
    "train.colocate_all": _FIXED,
    "train.colocate_actor_ref": "cluster.nodes, cluster.gpus_per_node and cluster.async_rollout place the processes",
    "train.colocate_critic_reward": "there is no reward model",
    "algo.advantage.is_correction_level": _FIXED,
    **_each(
        "algo.advantage",
        "is_correction_mode is_correction_gating is_correction_threshold",
        _LOSS.format("correction.mode, correction.low and correction.high"),
    ),
    "algo.advantage.gamma": _ADVANTAGE.format("loss.gamma"),
    "algo.advantage.lambd": _ADVANTAGE.format("loss.gae_lambda"),
    "algo.advantage.no_std_norm": _ADVANTAGE.format("loss.group_std"),
    "algo.kl.target": _LOSS.format("loss.kl_coef, which is constant"),
    "algo.kl.horizon": _LOSS.format("loss.kl_coef, which is constant"),
    "algo.kl.unbiased_gradient": _LOSS.format("loss.kl_type"),
    "algo.dynamic_filtering_enable": _FILTER,
    "algo.dynamic_filtering_range": _FILTER,
    "actor.eps_clip": _LOSS.format("loss.clip_eps"),
    "actor.eps_clip_low_high": _LOSS.format("loss.clip_eps and loss.clip_eps_high"),
    "actor.dual_clip": _LOSS.format("loss.dual_clip"),
    "actor.policy_loss_type": _LOSS.format("algo"),
    "actor.loss_agg_mode": _LOSS.format("loss.aggregation"),
    "actor.entropy_coef": _LOSS.format("loss.entropy_coef"),
    "actor.aux_loss_coef": "the loss is sorl's, which has no term that balances experts",
    "actor.freeze_visual_encoder": _VISION,
    "critic.value_clip": _LOSS.format("loss.value_clip"),
    "critic.freezing_steps": "use update.critic_warmup_steps",
    "critic.save_value_network": "each checkpoint holds the critic",
    **_each(
        "actor critic", "optim muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov", _MUON
    ),
    **_each("actor critic", "lr_warmup_ratio min_lr_ratio", _RATE),
    "train.enable_ema": _EMA,
    "train.ema_beta": _EMA,
    **_each(
        "reward",
        "model_name_or_path remote_url offload normalize_enable clip_range stop_properly_penalty_coef",
        _REWARD,
    ),
    "reward.overlong_buffer_len": "use overlong.buffer",
    "reward.overlong_penalty_factor": "use overlong.penalty",
    **_each(
        "data",
        "prompt_dataset prompt_probs prompt_split max_samples input_key label_key input_template "
        "dataloader_num_workers",
        _PROMPTS.format("task, task_args, data and split"),
    ),
    "data.apply_chat_template": _PROMPTS.format("chat_template"),
    "data.disable_fast_tokenizer": "the tokenizer is the same everywhere, or token ids would not agree",
    "data.image_key": _VISION,
    "data.max_images_per_prompt": _VISION,
    "eval.dataset": _PROMPTS.format("eval_data"),
    "eval.split": _PROMPTS.format("eval.split"),
    "eval.n_samples_per_prompt": _FIXED,
    "ckpt.best_metric_key": _FIXED,
    "ckpt.save_hf": "each checkpoint holds the policy as a plain folder",
    "ckpt.disable_ds": "a resume needs DeepSpeed's shards",
    "ckpt.max_mem": "it deletes checkpoints before the new one is whole; use checkpoint.keep",
    "logger.logging_steps": _LOGS.format("log"),
    "logger.tensorboard_dir": _LOGS.format("log.tensorboard"),
    "logger.wandb.key": _LOGS.format(
        "the environment variable WANDB_API_KEY; here it would be written to files"
    ),
    **_each("logger.wandb", "org group project run_name", _LOGS.format("log.wandb")),
    "use_ms": "only the first process would load from ModelScope; give model a folder",
}


def problems_of(flags: Mapping[str, Any]) -> list[str]:
    """One line for each flag of ``cluster.flags`` that cannot be used, with the reason; empty if all can be."""
    problems = []
    for name in flags:
        if name in ALLOWED:
            continue
        if name in OURS:
            problems.append(f"cluster.flags: {name} follows from a setting: use {OURS[name]}")
        elif name in REFUSED:
            problems.append(f"cluster.flags: {name} is not for this engine: {REFUSED[name]}")
        else:
            problems.append(f"cluster.flags: OpenRLHF has no flag {name}. {did_you_mean(name, ALLOWED)}")
    return problems
