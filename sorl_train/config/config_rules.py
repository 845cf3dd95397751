"""Which settings fit together: checks that need more than one field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

from sorl_env.errors import UserError
from sorl_train.algorithms import ALGORITHMS, Algorithm, RatioLevel
from sorl_train.config.run_settings import CorrectionConfig, ReplayConfig, RolloutConfig
from sorl_train.config.schema import as_text, flatten, unread
from sorl_train.config.settings import LossConfig, TrainConfig, UpdateConfig


def validate(config: TrainConfig, given: Collection[str] = ()) -> None:
    """Raise one ``UserError`` that lists everything that does not fit together in the config, if anything.

    ``given`` names settings that the user gave for this run alone, so each has to have an effect. A config that several
    algorithms share may hold others; ``remarks`` names them.
    """
    problems = [*_conflicts(config)]
    if config.stage == "rl":  # supervised training reads none of these
        algo, row = config.algo, config.algorithm
        problems += _batch_problems(algo, row, config.rollout, config.update, config.loss)
        problems += _without_effect(algo, row, flatten(config), given)
        if {"loss.kl_coef", "loss.kl_type", "loss.kl_in"} & set(given):
            problems += _kl_doubts(config.loss)
        problems += _correction_problems(config.correction, config.sampler.top_p, algo, row.ratio)
        if config.replay.size:
            problems += _replay_problems(config.replay, config.rollout, algo, row.needs_critic)
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} settings do not fit:\n" + "\n".join(f"  - {p}" for p in problems))


def _conflicts(config: TrainConfig) -> Iterator[str]:
    limits, search, device = config.limits, config.search, config.hardware.device
    prompt, total, buffer = limits.max_prompt_tokens, limits.max_trajectory_tokens, config.overlong.buffer
    if config.format == "tool_calls" and not config.chat_template:
        yield "format=tool_calls writes the messages of a chat template: use chat_template=true, or format=tags"
    if config.format == "tool_calls" and config.sft.demos is not None:
        yield (
            f"sft.demos ({config.sft.demos}) holds dialogues with tags; with format=tool_calls leave it out, and the "
            "task's scripted expert plays the demonstrations"
        )
    if search.corpus and search.url:
        yield f"search.corpus ({search.corpus}) and search.url ({search.url}) exclude each other: give one"
    if search.cache and not search.url:
        yield f"search.cache ({search.cache}) keeps the replies of servers: give search.url, or leave it out"
    if config.sampler.backend == "vllm":
        if config.lora.rank:
            yield "sampler.backend=vllm takes whole weights: use lora.rank=0, or sampler.backend=transformers"
        if ":" in device:
            yield (
                f"sampler.backend=vllm runs on the first visible GPU, not on {device}: choose it with "
                "CUDA_VISIBLE_DEVICES and set hardware.device=cuda"
            )
    if total is not None and prompt is not None and prompt >= total:
        yield f"limits.max_prompt_tokens {prompt} leaves no room in limits.max_trajectory_tokens {total}"
    if total is not None and buffer is not None and buffer >= total:
        yield (
            f"overlong.buffer {buffer} must be below limits.max_trajectory_tokens {total}: it is the last part of it"
        )


def _batch_problems(
    algo: str, algorithm: Algorithm, rollout: RolloutConfig, update: UpdateConfig, loss: LossConfig
) -> Iterator[str]:
    if algorithm.needs_groups and rollout.group_size < 2:
        yield (
            f"algo {algo} compares rollouts of one prompt: rollout.group_size must be at least 2, it is "
            f"{rollout.group_size}"
        )
    if rollout.dynamic_sampling and (algorithm.advantage != "group" or loss.group_level == "turn"):
        yield (
            f"rollout.dynamic_sampling {rollout.dynamic_sampling} looks for groups whose total rewards differ, but "
            f"algo {algo} has {algorithm.advantage} advantages, with loss.group_level={loss.group_level}"
            ": use an algorithm with group advantages, such as so_grpo, and loss.group_level=trajectory, or 0"
        )
    if loss.kl_in == "alone" and not loss.kl_coef:
        yield "loss.kl_in=alone with loss.kl_coef 0 leaves nothing to learn: give loss.kl_coef, or another loss.kl_in"
    if rollout.dynamic_sampling and loss.kl_in == "alone":
        yield (
            f"rollout.dynamic_sampling {rollout.dynamic_sampling} replaces groups of equal rewards, from which nothing "
            "is learned with loss.kl_in=alone: leave it out"
        )
    sizes = {"rollout.group_size": rollout.group_size, "update.mini_batch_size": update.mini_batch_size}
    for name, size in sizes.items():
        if rollout.batch_size % size:
            yield f"{name} {size} does not divide rollout.batch_size {rollout.batch_size}"
    if algorithm.needs_critic and update.critic_warmup_steps >= update.steps:
        yield (
            f"update.critic_warmup_steps {update.critic_warmup_steps} leaves the policy none of the update.steps "
            f"{update.steps}"
        )


def _correction_problems(
    correction: CorrectionConfig, top_p: float, algo: str, ratio: RatioLevel
) -> Iterator[str]:
    mode, level, levels = correction.mode, correction.level, get_args(RatioLevel)  # from the finest on
    if correction.is_on and top_p < 1:
        yield (
            f"correction.mode={mode}, correction.sequence_mask={correction.sequence_mask}: with sampler.top_p "
            f"{top_p:g} each weight would be off by the mass that was cut. Use sampler.top_p=1, or "
            "correction.mode=none without a sequence_mask"
        )
    if level != "auto" and mode != "none" and levels.index(level) < levels.index(ratio):
        yield (
            f"correction.level={level} is finer than the importance ratio of algo {algo}, which is one a "
            f"{ratio}. Use correction.level=auto"
        )


def _replay_problems(
    replay: ReplayConfig, rollout: RolloutConfig, algo: str, needs_critic: bool
) -> Iterator[str]:
    if needs_critic:
        yield (
            f"replay.size {replay.size} lets past rollouts join new ones, but algo {algo} does not compare rollouts: "
            "use an algorithm with group advantages, such as so_grpo, or replay.size=0"
        )
    if rollout.dynamic_sampling:
        yield (
            f"replay.size {replay.size} and rollout.dynamic_sampling {rollout.dynamic_sampling} both replace groups "
            "without a signal: set one of them to 0"
        )
    if replay.mode == "success" and replay.per_group >= rollout.group_size > 1:
        yield (
            f"replay.per_group {replay.per_group} leaves none of the {rollout.group_size} new rollouts of a group "
            "(rollout.group_size) to compare with: make it smaller"
        )
    if replay.per_group > replay.size:
        yield (
            f"replay.per_group {replay.per_group} is more than the buffer holds (replay.size {replay.size}): make it "
            "smaller"
        )


def remarks(config: TrainConfig) -> list[str]:
    """What the algorithm brings and the config has otherwise, and what the config has and this run does not use, or not
    well: a sentence each. That may be meant, or come from a config that several algorithms share."""
    if config.stage != "rl":
        return []
    here, default = flatten(config), flatten(TrainConfig())
    told = [
        f"{name} is {as_text(here[name])}; {config.algo} comes with {as_text(own)}"
        for name, own in config.algorithm.defaults.items()
        if here[name] != own
    ]
    by_need: dict[str, list[str]] = {}
    for name, need in unread(config.algorithm, here).items():
        if here[name] != default[name]:
            by_need.setdefault(need, []).append(name)
    found = [f"{' and '.join(names)} (for want of {need})" for need, names in by_need.items()]
    told += [f"no effect on {config.algo}: {', '.join(found)}"] if found else []
    return told + _kl_doubts(config.loss)


def _kl_doubts(loss: LossConfig) -> list[str]:
    """What is wrong with the estimator of the KL where it stands (``losses.terms``)."""
    if not loss.kl_coef or (loss.kl_type == "k1") == (loss.kl_in == "reward"):
        return []
    if loss.kl_in != "reward":
        return ["loss.kl_type k1 has no effect in the loss, where its gradient is 0 in expectation: use k2"]
    return [
        f"loss.kl_type {loss.kl_type} in the reward is another penalty than the KL: use k1 with loss.kl_in=reward"
    ]


def _without_effect(
    algo: str, algorithm: Algorithm, values: Mapping[str, Any], given: Collection[str]
) -> Iterator[str]:
    """A line for each setting of ``given`` that this run would not read; None and {} ask for nothing."""
    for name, need in unread(algorithm, values).items():
        if name in given and values[name] not in (None, {}):
            readers = [other for other, row in ALGORITHMS.items() if name not in unread(row, values)]
            which = f"algo {algo}" if readers else "this run"
            other = f", or use --algo {' or '.join(readers)}" if readers else ""
            value = as_text(values[name])
            yield f"{name} {value} has no effect on {which}: it needs {need}. Leave it out{other}"
