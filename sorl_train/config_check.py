"""Checks that need more than one field's type: ranges, and settings that must fit together."""

from __future__ import annotations

from operator import attrgetter

from sorl_env.errors import UserError
from sorl_train.config import GROUP_ALGOS, TrainConfig

_AT_LEAST_ONE = """
    search.top_k sampler.max_concurrency rollout.batch_size rollout.group_size rollout.save_every
    update.steps update.mini_batch_size update.micro_batch_size update.critic_micro_batch_size
    update.log_prob_micro_batch_size update.epochs sft.num_demos sft.steps sft.batch_size sft.micro_batch_size
    eval.num_examples eval.num_examples_final checkpoint.keep
    limits.max_turns limits.max_prompt_tokens limits.max_new_tokens limits.max_observation_tokens
    limits.max_trajectory_tokens limits.max_reply_chars
""".split()
_POSITIVE = """
    search.timeout_s sampler.temperature loss.clip_eps loss.clip_eps_high loss.dual_clip loss.clip_bias_delta
    loss.value_clip update.target_kl optim.lr optim.critic_lr optim.adam_eps optim.max_grad_norm sft.lr
    sft.max_grad_norm limits.max_seconds alarm.strain alarm.ratio_tail alarm.invalid_turns alarm.grad_norm
    alarm.entropy alarm.roll_back_lr
""".split()
_NOT_NEGATIVE = """
    seed search.retries sampler.max_mismatch rollout.max_staleness loss.kl_coef loss.entropy_coef optim.weight_decay
    update.critic_warmup_steps hardware.lora_rank hardware.threads eval.every eval.patience eval.temperature
    checkpoint.every
""".split()
_SHARES = """
    sampler.top_p sampler.gpu_memory loss.gamma loss.gae_lambda optim.warmup_ratio
    optim.critic_warmup_ratio optim.beta1 optim.beta2 sft.warmup_ratio
""".split()


def validate(config: TrainConfig) -> None:
    """Raise one ``UserError`` that lists everything wrong with the config; return when nothing is."""
    problems = [*_out_of_range(config), *_batch_problems(config), *_choice_problems(config)]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} settings do not fit:\n" + "\n".join(f"  - {p}" for p in problems))


def _out_of_range(config: TrainConfig) -> list[str]:
    checks = (
        (_AT_LEAST_ONE, lambda value: value >= 1, "must be at least 1"),
        (_POSITIVE, lambda value: value > 0, "must be above 0"),
        (_NOT_NEGATIVE, lambda value: value >= 0, "cannot be negative"),
        (_SHARES, lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
    )
    problems = []
    for names, holds, rule in checks:
        for name in names:
            value = attrgetter(name)(config)
            if value is not None and not holds(value):
                problems.append(f"{name} {rule}, it is {value}")
    return problems


def _batch_problems(config: TrainConfig) -> list[str]:
    batch, group, mini = config.rollout.batch_size, config.rollout.group_size, config.update.mini_batch_size
    problems = []
    if config.algo in GROUP_ALGOS and group < 2:
        problems.append(
            f"algo {config.algo} compares rollouts of one prompt: rollout.group_size must be at least 2, it is {group}"
        )
    if group >= 1 and batch % group:
        problems.append(f"rollout.group_size {group} does not divide rollout.batch_size {batch}")
    if mini >= 1 and batch % mini:
        problems.append(f"update.mini_batch_size {mini} does not divide rollout.batch_size {batch}")
    if config.update.critic_warmup_steps >= config.update.steps >= 1:
        problems.append(
            f"update.critic_warmup_steps {config.update.critic_warmup_steps} leaves the policy none of the "
            f"update.steps {config.update.steps}"
        )
    return problems


def _choice_problems(config: TrainConfig) -> list[str]:
    problems = []
    loss, limits = config.loss, config.limits
    if config.search.corpus and config.search.url:
        problems.append(
            f"search.corpus ({config.search.corpus}) and search.url ({config.search.url}) exclude each other: give one"
        )
    if config.search.cache and not config.search.url:
        problems.append(
            f"search.cache ({config.search.cache}) keeps the replies of servers: give search.url, or leave it out"
        )
    if loss.clip_bias_norm == "gradient" and loss.clip_bias_scope == "trajectory":
        problems.append(
            "loss.clip_bias_norm=gradient needs one backward pass for each norm, so it goes only with "
            "loss.clip_bias_scope=mini_batch"
        )
    if loss.clip_eps >= 1:
        problems.append(
            f"loss.clip_eps must be below 1 (the lower bound is 1 - clip_eps), it is {loss.clip_eps}"
        )
    if max(config.optim.beta1, config.optim.beta2) == 1:
        problems.append("optim.beta1 and optim.beta2 must be below 1")
    if config.sampler.backend == "vllm" and config.hardware.lora_rank:
        problems.append(
            "sampler.backend=vllm takes whole weights: hardware.lora_rank goes only with sampler.backend=transformers"
        )
    if config.sampler.backend == "vllm" and ":" in config.hardware.device:
        problems.append(
            f"sampler.backend=vllm runs on the first GPU that is visible, not on {config.hardware.device}: choose it "
            "with CUDA_VISIBLE_DEVICES and hardware.device=cuda"
        )
    if config.sampler.top_p == 0:
        problems.append("sampler.top_p must be above 0")
    prompt, total = limits.max_prompt_tokens, limits.max_trajectory_tokens
    if prompt is not None and total is not None and prompt >= total:
        problems.append(
            f"limits.max_prompt_tokens {prompt} leaves no room in limits.max_trajectory_tokens {total}"
        )
    return problems
