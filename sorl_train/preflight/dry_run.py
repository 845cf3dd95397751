"""``--dry_run``: what a command would train, on what, and in how much memory; nothing is trained or kept."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from sorl_env.env import ToolUseEnv
from sorl_env.folders import cache_folder
from sorl_env.tokens import encode_prompt
from sorl_train.config.checks import check_tiny
from sorl_train.config.schema import as_text, flatten
from sorl_train.config.settings import CRITIC_ALGOS, TINY, TrainConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import load_tokenizer
from sorl_train.models.shape import ModelShape, model_shape
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.openrlhf.flags import check
from sorl_train.preflight.cluster_plan import openrlhf_parts
from sorl_train.preflight.memory import MemoryEstimate, estimate_memory, gigabytes
from sorl_train.rollout.environments import make_env
from sorl_train.sft.cold_start import cold_start_key


def plan_text(config: TrainConfig) -> str:
    """The plan of a run. Raises ``UserError`` for whatever would stop it before its first step."""
    if config.engine == "openrlhf":
        check(config)
    transformers_logging.disable_progress_bar()
    env, eval_env = make_env(config), make_env(config, evaluation=True)
    with _model_folder(config, env) as (folder, origin):
        tokenizer = load_tokenizer(folder)
        shape = model_shape(folder, config.hardware.lora_rank)
        prompt = _prompt(config, env, tokenizer)
    parts: list[tuple[str, list[str]]] = [
        ("Dry run: nothing is trained, no run folder is made.", []),
        ("Settings (* differs from the default)", _settings(config)),
        ("Data", [_source("train", env), _source("eval", eval_env), *_cautions(env, eval_env), *prompt]),
        ("Tools", _tools(env)),
        ("Model", _model(config, shape, origin)),
    ]
    if config.engine == "openrlhf":
        parts += openrlhf_parts(config, shape, env.limits, _start(config))
    else:
        parts.append(("Memory, upper bound", _memory(config, shape, env)))
    parts.append(("Steps", _steps(config)))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


@contextmanager
def _model_folder(config: TrainConfig, env: ToolUseEnv) -> Iterator[tuple[str, str]]:
    """Where the model's sizes and tokenizer can be read, and a word on where the policy will come from."""
    if config.model != TINY:
        yield config.model, config.model
        return
    cached = _start(config)
    if Path(cached).is_dir():
        yield cached, f"tiny, cold-started before and kept in {cached}"
        return
    with tempfile.TemporaryDirectory() as folder:
        check_tiny(config.hardware.tiny)
        build_tiny_policy(env.task, folder, seed=config.seed, **config.hardware.tiny)
        cold_start = (
            f"after a cold start of {config.sft.steps} supervised steps"
            if config.stage == "rl"
            else "untrained"
        )
        yield folder, f"tiny, built for the task, {cold_start}"


def _start(config: TrainConfig) -> str:
    """The folder or hub name of the policy that a run starts from; the tiny one need not be there yet."""
    if config.model != TINY:
        return config.model
    return str(cache_folder() / "policies" / cold_start_key(config))


def _settings(config: TrainConfig) -> list[str]:
    lines = []
    for (name, value), default in zip(flatten(config).items(), flatten(TrainConfig()).values(), strict=True):
        same = value == default
        note = "" if same else f"  (default {as_text(default)})"
        lines.append(f"{' ' if same else '*'} {name}: {as_text(value)}{note}")
    return lines


def _source(name: str, env: ToolUseEnv) -> str:
    examples = env.examples
    count = f"{len(examples.examples):,} examples"
    return f"{name}: {examples.source}, split {examples.split}, {count}, sha256 {examples.sha256[:16]}"


def _cautions(env: ToolUseEnv, eval_env: ToolUseEnv) -> list[str]:
    notes = []
    if env.examples.is_sample or eval_env.examples.is_sample:
        notes.append(
            "CAUTION: the task's embedded sample is not the benchmark; give --data for real questions"
        )
    if env.examples.sha256 == eval_env.examples.sha256:
        notes.append(
            "CAUTION: evaluation is on the training questions; give --eval_data, or a folder of splits"
        )
    return notes


def _prompt(config: TrainConfig, env: ToolUseEnv, tokenizer: Any) -> list[str]:
    example = env.examples.examples[0]
    text = env.task.prompt(example)
    ids = encode_prompt(
        tokenizer, text, env.task.system_prompt, use_chat_template=config.hardware.chat_template
    )
    shown = textwrap.shorten(text, 600, placeholder=" ...")
    return [
        f"first prompt, {len(ids)} tokens of at most {env.limits.max_prompt_tokens}:",
        *textwrap.wrap(shown, 100, initial_indent="  ", subsequent_indent="  "),
    ]


def _tools(env: ToolUseEnv) -> list[str]:
    return [
        textwrap.shorten(f"{t.name}: {t.description}", 110, placeholder=" ..") for t in env.toolbox.tools
    ] or ["none"]


def _model(config: TrainConfig, shape: ModelShape, origin: str) -> list[str]:
    lines = [
        f"policy: {origin}",
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; {shape.layers} layers of width {shape.hidden}, "
        f"{shape.vocabulary:,} words",
    ]
    if config.algo in CRITIC_ALGOS and config.stage == "rl":
        lines.append(f"critic: {shape.backbone_parameters + shape.hidden + 1:,} parameters")
    if config.loss.kl_coef > 0 and config.stage == "rl":
        lines.append("reference: a frozen copy of the policy (loss.kl_coef=0 does without)")
    return lines


def _memory(config: TrainConfig, shape: ModelShape, env: ToolUseEnv) -> list[str]:
    device = pick_device(config.hardware.device)
    dtype = compute_dtype(config.hardware, device)
    need = estimate_memory(config, shape, env.limits, dtype.itemsize)
    rows = (
        ("weights", need.weights, "policy and critic, float32"),
        ("gradients", need.gradients, ""),
        ("optimizer", need.optimizer, "Adam's two moments"),
        ("reference", need.reference, ""),
        ("sampling", need.sampling, "key-value cache of the rows in flight (sampler.max_concurrency)"),
        ("scoring", need.scoring, "update.log_prob_micro_batch_size"),
        ("updating", need.updating, "activations and logits of a micro-batch"),
    )
    lines = [f"{name:<10}{gigabytes(size):>9}  {note}".rstrip() for name, size, note in rows]
    lines.append(_peak(need))
    if config.sampler.backend == "vllm":
        lines.append(f"and {config.sampler.gpu_memory:.0%} of the GPU for vLLM (sampler.gpu_memory)")
    return [f"on {device.type}, computing in {str(dtype).removeprefix('torch.')}", *lines]


def _peak(need: MemoryEstimate) -> str:
    made_of = "the first four, the largest of the others, a small cache that is kept"
    return f"{'peak':<10}{gigabytes(need.peak):>9}  {made_of}"


def _steps(config: TrainConfig) -> list[str]:
    if config.stage == "sft":
        return [f"{config.sft.steps} supervised steps of {config.sft.batch_size} demonstrations"]
    update, rollout = config.update, config.rollout
    mini = rollout.batch_size // update.mini_batch_size
    prompts = rollout.batch_size // rollout.group_size
    each = mini * update.epochs
    return [
        f"a step collects {rollout.batch_size} trajectories, {prompts} prompts of {rollout.group_size}",
        f"and takes {each} optimizer steps: {update.epochs} epochs of {mini} mini-batches of {update.mini_batch_size}",
        f"{update.steps} steps: {update.steps * each:,} optimizer steps, "
        f"{update.steps * rollout.batch_size:,} trajectories",
        f"run folder: {config.run_dir}"
        + (" (exists already)" if Path(config.run_dir or "").exists() else ""),
    ]
