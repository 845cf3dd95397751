"""``--dry_run``: what a command would train, on which data, and in how much memory. Nothing is trained or kept."""

from __future__ import annotations

import dataclasses
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from sorl_env.env import ToolUseEnv
from sorl_env.prompt_tokens import check_prompts
from sorl_env.text_env import TextEnv
from sorl_env.turn_codec import make_codec
from sorl_train.config.files import remarks
from sorl_train.config.schema import as_text, flatten
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import load_tokenizer
from sorl_train.models.shape import ModelShape, model_shape
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.openrlhf.checks import check_model
from sorl_train.preflight.cluster_plan import openrlhf_parts
from sorl_train.preflight.inputs import check_settings, repeats
from sorl_train.preflight.memory import estimate_memory, gigabytes
from sorl_train.rollout.environments import make_env
from sorl_train.sft.cold_start import start_folder


def plan_text(config: TrainConfig) -> str:
    """Describe a run. Raises ``UserError`` for whatever would stop it before its first step."""
    check_settings(config)
    transformers_logging.disable_progress_bar()
    env, eval_env = make_env(config), make_env(config, evaluation=True)
    with model_folder(config, env) as (folder, origin):
        tokenizer = load_tokenizer(folder)
        shape = model_shape(folder, config.lora.rank)
        if config.engine == "openrlhf":
            check_model(config, shape)
        prompts = _prompts(config, env, eval_env, tokenizer)
    parts: list[tuple[str, list[str]]] = [
        ("Dry run: nothing is trained, no run folder is made.", []),
        ("Settings (* differs from the default)", _settings(config)),
        (
            "Data",
            [_source("train", env), _source("eval", eval_env), *_cautions(config, env, eval_env), *prompts],
        ),
        ("Tools", _tools(env)),
        ("Model", _model(config, shape, origin)),
    ]
    if config.engine == "openrlhf":
        parts += openrlhf_parts(config, shape, env.limits, start_folder(config))
    else:
        parts.append(("Memory, upper bound", _memory(config, shape, env)))
    parts.append(("Steps", _steps(config)))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


@contextmanager
def model_folder(config: TrainConfig, env: TextEnv) -> Iterator[tuple[str, str]]:
    """A folder or hub name with the model's sizes and tokenizer, and a phrase about the policy's origin."""
    if config.model != TINY:
        yield config.model, config.model
        return
    cached = start_folder(config)
    if Path(cached).is_dir():
        yield cached, f"tiny, cold-started by an earlier run and cached in {cached}"
        return
    trained = (
        f"cold-started with {config.sft.steps} supervised steps" if config.stage == "rl" else "untrained"
    )
    with tempfile.TemporaryDirectory() as folder:
        sizes = dataclasses.asdict(config.tiny)
        build_tiny_policy(env.task, folder, seed=config.seed, format=config.format, **sizes)
        yield folder, f"tiny, built for the task, {trained}"


def _settings(config: TrainConfig) -> list[str]:
    lines = []
    for (name, value), default in zip(flatten(config).items(), flatten(TrainConfig()).values(), strict=True):
        same = value == default
        note = "" if same else f"  (default {as_text(default)})"
        lines.append(f"{' ' if same else '*'} {name}: {as_text(value)}{note}")
    return lines + remarks(config)


def _source(name: str, env: TextEnv) -> str:
    examples = env.examples
    count = f"{len(examples.examples):,} examples"
    return f"{name}: {examples.source}, split {examples.split}, {count}, sha256 {examples.sha256[:16]}"


def _cautions(config: TrainConfig, env: TextEnv, eval_env: TextEnv) -> list[str]:
    notes = []
    if env.examples.is_sample or eval_env.examples.is_sample:
        notes.append(
            "CAUTION: this is the task's embedded sample, not the benchmark; give --data with real questions"
        )
    if env.examples.sha256 == eval_env.examples.sha256:
        notes.append(
            "CAUTION: evaluation uses the training questions; give --eval_data, or --data a folder with splits"
        )
    if caution := repeats(config, len(env.examples)):
        notes.append(f"CAUTION: {caution}")
    return notes


def _prompts(config: TrainConfig, env: TextEnv, eval_env: TextEnv, tokenizer: Any) -> list[str]:
    longest = check_prompts([env, eval_env], tokenizer, use_chat_template=config.chat_template)
    first = env.examples.examples[0]
    text = env.format.prompt(env.task, first) if isinstance(env, ToolUseEnv) else env.task.prompt(first)
    codec = make_codec(env, tokenizer, use_chat_template=config.chat_template)
    ids = codec.prompt_ids(text, env.task.system_prompt)
    shown = textwrap.shorten(text, 600, placeholder=" ...")
    return [
        f"first prompt, {len(ids)} tokens of at most {env.limits.max_prompt_tokens}; the longest has {longest or '?'}:",
        *textwrap.wrap(shown, 100, initial_indent="  ", subsequent_indent="  "),
    ]


def _tools(env: TextEnv) -> list[str]:
    if not isinstance(env, ToolUseEnv):
        return ["those of its environment"]
    tools = [f"{tool.name}: {tool.description}" for tool in env.toolbox.tools]
    return [textwrap.shorten(text, 110, placeholder=" ..") for text in tools] or ["none"]


def _model(config: TrainConfig, shape: ModelShape, origin: str) -> list[str]:
    lines = [
        f"policy: {origin}",
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; {shape.layers} layers of width {shape.hidden}, "
        f"{shape.vocabulary:,} words",
    ]
    if config.algorithm.needs_critic and config.stage == "rl":
        lines.append(f"critic: {shape.critic_parameters:,} parameters")
    if config.loss.kl_coef > 0 and config.stage == "rl":
        lines.append("reference: a frozen copy of the policy (none with loss.kl_coef=0)")
    return lines


def _memory(config: TrainConfig, shape: ModelShape, env: TextEnv) -> list[str]:
    device = pick_device(config.hardware.device)
    dtype = compute_dtype(config.hardware.dtype, device)
    need = estimate_memory(config, shape, env.limits, dtype.itemsize)
    rows = [
        ("weights", need.weights, "policy and critic, float32"),
        ("gradients", need.gradients, ""),
        ("optimizer", need.optimizer, "Adam's two moments"),
        ("reference", need.reference, ""),
        (
            "sampling",
            need.sampling,
            "key-value cache of the trajectories in flight (sampler.max_concurrency)",
        ),
        ("scoring", need.scoring, "update.log_prob_micro_batch_size"),
        ("updating", need.updating, "activations and logits of a micro-batch"),
        (
            "peak",
            need.peak,
            "the first four, the largest of the next three, and a small cache that is kept",
        ),
    ]
    if need.trust_region:
        note = "of the trained weights, in host memory, not in the peak (update.trust_kl)"
        rows.append(("copy", need.trust_region, note))
    lines = [f"{name:<10}{gigabytes(size):>9}  {note}".rstrip() for name, size, note in rows]
    if config.sampler.backend == "vllm":
        lines.append(f"in addition {config.sampler.gpu_memory:.0%} of the GPU for vLLM (sampler.gpu_memory)")
    return [f"on {device.type}, computing in {str(dtype).removeprefix('torch.')}", *lines]


def _steps(config: TrainConfig) -> list[str]:
    if config.stage == "sft":
        return [f"{config.sft.steps} supervised steps of {config.sft.batch_size} demonstrations"]
    update, rollout = config.update, config.rollout
    mini = rollout.batch_size // update.mini_batch_size
    prompts = rollout.batch_size // rollout.group_size
    each = mini * update.epochs
    exists = " (exists already)" if config.run_dir and Path(config.run_dir).exists() else ""
    return [
        f"a step collects {rollout.batch_size} trajectories: {prompts} prompts, {rollout.group_size} rollouts of each",
        f"and takes {each} optimizer steps: {update.epochs} epochs of {mini} mini-batches of {update.mini_batch_size}",
        f"{update.steps} steps: {update.steps * each:,} optimizer steps, "
        f"{update.steps * rollout.batch_size:,} trajectories",
        f"run folder: {config.run_dir}{exists}",
    ]
