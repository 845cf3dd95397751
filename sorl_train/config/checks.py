"""Checks that need more than one field's type: bounds, and settings that must fit together."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from sorl_env.errors import UserError, did_you_mean
from sorl_train.algorithms import ALGORITHMS, RatioLevel, unread
from sorl_train.config.run_settings import device_problem
from sorl_train.config.schema import as_text, fields, flatten
from sorl_train.config.settings import TrainConfig

FILTERED_STOPS = ("max_tokens", "max_turns", "max_seconds", "invalid")  # what ``overlong.exclude`` may name


def validate(config: TrainConfig, given: Collection[str] = ()) -> None:
    """Raise one ``UserError`` that lists everything wrong with the config, if anything is.

    Args:
        given: names of settings that the user gave for this run alone, so each has to have an effect. A config that
            several algorithms share may hold others; ``doubts`` names them.
    """
    problems = [*_out_of_bounds(config), *_conflicts(config)]
    if config.stage == "rl":  # supervised training reads none of these
        problems += [
            *_batch_problems(config),
            *_without_effect(config, given),
            *(_kl_doubts(config) if {"loss.kl_coef", "loss.kl_type", "loss.kl_in"} & set(given) else []),
            *_correction_problems(config),
            *_overlong_problems(config),
            *_replay_problems(config),
        ]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} settings do not fit:\n" + "\n".join(f"  - {p}" for p in problems))


def _out_of_bounds(config: TrainConfig) -> list[str]:
    """A line for each number outside the bounds that its field has (see ``field.opt``)."""
    values = flatten(config)
    problems = []
    for field in fields():
        value = values[field.name]
        if field.is_number and value is not None and (problem := field.bounds.problem(value)) is not None:
            problems.append(f"{field.name} {problem}")
    return problems


def _batch_problems(config: TrainConfig) -> list[str]:
    update, batch, group = config.update, config.rollout.batch_size, config.rollout.group_size
    problems = []
    if config.algorithm.needs_groups and group < 2:
        problems.append(
            f"algo {config.algo} compares rollouts of one prompt: rollout.group_size must be at least 2, it is {group}"
        )
    if config.rollout.dynamic_sampling and config.algorithm.advantage != "group":
        problems.append(
            f"rollout.dynamic_sampling {config.rollout.dynamic_sampling} looks for groups whose total rewards differ, "
            f"but algo {config.algo} has {config.algorithm.advantage} advantages: use an algorithm with group "
            "advantages, such as so_grpo, or 0"
        )
    elif config.rollout.dynamic_sampling and config.loss.group_level == "turn":
        problems.append(
            f"rollout.dynamic_sampling {config.rollout.dynamic_sampling} looks for groups whose total rewards differ, "
            "but loss.group_level=turn also learns from groups whose turns alone differ: use "
            "loss.group_level=trajectory, or rollout.dynamic_sampling=0"
        )
    for name, size in (("rollout.group_size", group), ("update.mini_batch_size", update.mini_batch_size)):
        if size >= 1 and batch % size:
            problems.append(f"{name} {size} does not divide rollout.batch_size {batch}")
    if config.critic_warmup_steps >= update.steps >= 1:
        problems.append(
            f"update.critic_warmup_steps {config.critic_warmup_steps} leaves the policy none of the "
            f"update.steps {update.steps}"
        )
    return problems


def _correction_problems(config: TrainConfig) -> list[str]:
    mode, level, top_p = config.correction.mode, config.correction.level, config.sampler.top_p
    ratio, levels = config.algorithm.ratio, get_args(RatioLevel)  # from the finest on
    applies = {
        f"correction.mode={mode}, correction.sequence_mask={config.correction.sequence_mask}: with sampler.top_p "
        f"{top_p:g} the sampler's log-probabilities are those of the truncated distribution and the trainer's are not, "
        "so each weight would be off by the mass that was kept. Use sampler.top_p=1, or correction.mode=none without a "
        "sequence_mask": config.correction.is_on and top_p < 1,
        f"correction.level={level} is finer than the importance ratio of algo {config.algo}, which is one a {ratio}: a "
        f"token of weight 0 would still get the gradient of its {ratio}. Use correction.level=auto": (
            level != "auto" and mode != "none" and levels.index(level) < levels.index(ratio)
        ),
    }
    return [problem for problem, holds in applies.items() if holds]


def _overlong_problems(config: TrainConfig) -> list[str]:
    overlong, limit = config.overlong, config.limits.max_trajectory_tokens
    problems = []
    if overlong.buffer is not None and limit is not None and overlong.buffer >= limit:
        problems.append(
            f"overlong.buffer {overlong.buffer} must be below limits.max_trajectory_tokens {limit}: it is the last "
            "part of it"
        )
    return problems + [
        f"overlong.exclude: {name!r} is no stop reason to leave out (those that end with 'error' or 'aborted' are in "
        f"no loss anyway). {did_you_mean(name, FILTERED_STOPS)}"
        for name in sorted(overlong.excluded_stops - set(FILTERED_STOPS))
    ]


def _replay_problems(config: TrainConfig) -> list[str]:
    replay, rollout, size = config.replay, config.rollout, config.replay.size
    if config.stage != "rl" or not size:
        return []
    applies = {
        f"replay.size {size} lets past rollouts of a question join its new ones, but algo {config.algo} does not "
        "compare rollouts, and its critic has no values of theirs: use an algorithm with group advantages, such as "
        "so_grpo, or replay.size=0": config.algorithm.needs_critic,
        f"replay.size {size} and rollout.dynamic_sampling {rollout.dynamic_sampling} both replace groups without a "
        "signal: set one of them to 0": rollout.dynamic_sampling > 0,
        f"replay.per_group {replay.per_group} leaves none of the {rollout.group_size} new rollouts of a group "
        "(rollout.group_size) to compare with: make it smaller": (
            replay.mode == "success" and replay.per_group >= rollout.group_size > 1
        ),
        f"replay.per_group {replay.per_group} is more than the buffer holds (replay.size {size}): make it smaller": (
            replay.per_group > size
        ),
    }
    return [problem for problem, holds in applies.items() if holds]


def _conflicts(config: TrainConfig) -> list[str]:
    loss, limits, search, device = config.loss, config.limits, config.search, config.hardware.device
    wrong_device = device_problem(device)
    on_vllm = config.sampler.backend == "vllm"
    prompt, total = limits.max_prompt_tokens, limits.max_trajectory_tokens
    applies = {
        f"hardware.device {wrong_device}": wrong_device is not None,
        "format=tool_calls writes the messages of a chat template: use chat_template=true, or format=tags": (
            config.format == "tool_calls" and not config.chat_template
        ),
        f"sft.demos ({config.sft.demos}) holds dialogues with tags; with format=tool_calls leave it out, and the "
        "task's scripted expert plays the demonstrations": (
            config.format == "tool_calls" and config.sft.demos is not None
        ),
        f"search.corpus ({search.corpus}) and search.url ({search.url}) exclude each other: give one": (
            search.corpus and search.url
        ),
        f"search.cache ({search.cache}) keeps the replies of servers: give search.url, or leave it out": (
            search.cache and not search.url
        ),
        f"loss.clip_eps must be below 1 (the lower bound is 1 - clip_eps), it is {loss.clip_eps}": (
            loss.clip_eps >= 1
        ),
        "optim.beta1 and optim.beta2 must be below 1": max(config.optim.beta1, config.optim.beta2) == 1,
        "sampler.backend=vllm takes whole weights: use lora.rank=0, or sampler.backend=transformers": (
            on_vllm and config.lora.rank
        ),
        f"sampler.backend=vllm runs on the first visible GPU, not on {device}: choose it with CUDA_VISIBLE_DEVICES "
        "and set hardware.device=cuda": on_vllm and ":" in device,
        f"limits.max_prompt_tokens {prompt} leaves no room in limits.max_trajectory_tokens {total}": (
            prompt is not None and total is not None and prompt >= total
        ),
    }
    return [problem for problem, holds in applies.items() if holds]


def doubts(config: TrainConfig) -> list[str]:
    """What a config that several algorithms share has and this run does not use, or not well: a sentence each."""
    here, default = flatten(config), flatten(TrainConfig())
    by_need: dict[str, list[str]] = {}
    for name, need in _unread(config).items():
        if here[name] != default[name]:
            by_need.setdefault(need, []).append(name)
    found = [f"{' and '.join(names)} (for want of {need})" for need, names in by_need.items()]
    return ([f"no effect on {config.algo}: {', '.join(found)}"] if found else []) + _kl_doubts(config)


def _kl_doubts(config: TrainConfig) -> list[str]:
    """What is wrong with the estimator of the KL where it stands (``losses.kl``)."""
    loss = config.loss
    if config.stage != "rl" or not loss.kl_coef or (loss.kl_type == "k1") == (loss.kl_in == "reward"):
        return []
    if loss.kl_in == "loss":
        return ["loss.kl_type k1 has no effect in the loss, where its gradient is 0 in expectation: use k2"]
    return [
        f"loss.kl_type {loss.kl_type} in the reward is another penalty than the KL: use k1 with loss.kl_in=reward"
    ]


def _without_effect(config: TrainConfig, given: Collection[str]) -> list[str]:
    """A line for each setting of ``given`` that this run would not read; None and {} ask for nothing."""
    values, problems = flatten(config), []
    for name, need in _unread(config).items():
        if name in given and values[name] not in (None, {}):
            readers = [algo for algo, row in ALGORITHMS.items() if name not in unread(row, values)]
            which, other = (
                (f"algo {config.algo}", f", or use --algo {' or '.join(readers)}")
                if readers
                else ("this run", "")
            )
            said = f"{name} {as_text(values[name])} has no effect on {which}: it needs {need}"
            problems.append(f"{said}. Leave it out{other}")
    return problems


def _unread(config: TrainConfig) -> dict[str, str]:
    """``unread`` of the config; supervised fine-tuning reads few settings and is not asked."""
    return unread(config.algorithm, flatten(config)) if config.stage == "rl" else {}
