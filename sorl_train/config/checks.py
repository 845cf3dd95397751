"""Checks that need more than one field's type: ranges, and settings that must fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_train.config.schema import fields, flatten
from sorl_train.config.settings import TrainConfig

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")


def validate(config: TrainConfig) -> None:
    """Raise one ``UserError`` that lists everything wrong with the config; return when nothing is."""
    problems = [*_out_of_range(config), *_batch_problems(config), *_choice_problems(config)]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} settings do not fit:\n" + "\n".join(f"  - {p}" for p in problems))


def _out_of_range(config: TrainConfig) -> list[str]:
    """One line for each number that is outside the bounds of its field (`sorl_train.config.settings.opt`)."""
    values = flatten(config)
    problems = []
    for field in fields():
        value = values[field.name]
        if field.is_number and value is not None and (problem := field.bounds.problem(value)) is not None:
            problems.append(f"{field.name} {problem}")
    return problems


def check_device(name: str) -> None:
    """Raise ``UserError`` unless ``name`` is a device's. Whether it is there, torch says when it is used."""
    if not _DEVICE.fullmatch(name):
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps")


def _batch_problems(config: TrainConfig) -> list[str]:
    batch, group, mini = config.rollout.batch_size, config.rollout.group_size, config.update.mini_batch_size
    problems = []
    if config.algorithm.advantage == "group" and group < 2:
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
    if not _DEVICE.fullmatch(config.hardware.device):
        problems.append(
            f"hardware.device {config.hardware.device!r} is unknown: use auto, cpu, cuda, cuda:1 or mps"
        )
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
    prompt, total = limits.max_prompt_tokens, limits.max_trajectory_tokens
    if prompt is not None and total is not None and prompt >= total:
        problems.append(
            f"limits.max_prompt_tokens {prompt} leaves no room in limits.max_trajectory_tokens {total}"
        )
    return problems


def check_tiny(tiny: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for an unknown name or a size out of range in ``hardware.tiny``."""
    names = ("hidden_size", "num_layers", "num_heads")
    problems = [
        f"unknown key 'hardware.tiny.{key}'. {did_you_mean(str(key), names)}"
        for key in tiny
        if key not in names
    ]
    problems += [
        f"hardware.tiny.{name} must be a whole number from 1 to 65536, it is {tiny[name]!r}"
        for name in names
        if name in tiny and (type(tiny[name]) is not int or not 1 <= tiny[name] <= 65536)
    ]
    if problems:
        raise UserError("\n".join(problems))
