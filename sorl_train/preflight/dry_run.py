"""``--dry_run``: what a command would train, on which data, and in how much memory. Nothing is trained or kept."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.prompt_tokens import check_prompts
from sorl_env.text_env import TextEnv
from sorl_env.turn_codec import make_codec
from sorl_train.config.files import remarks
from sorl_train.config.schema import as_text, flatten
from sorl_train.config.settings import TrainConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import ModelShape, load_tokenizer, model_shape
from sorl_train.openrlhf.checks import check_model
from sorl_train.preflight.checks import examine
from sorl_train.preflight.cluster_plan import openrlhf_parts
from sorl_train.preflight.finding import Run
from sorl_train.preflight.inputs import planned
from sorl_train.preflight.memory import estimate_memory, row
from sorl_train.sft.cold_start import start_folder

CHECKS = ("settings", "task", "data", "model", "corpus")  # those that any machine can make


def plan_text(config: TrainConfig) -> str:
    """Describe a run. Raises ``UserError`` for whatever would stop it before its first step."""
    findings = list(examine(Run(config), CHECKS))
    for finding in findings:
        if finding.status == "fail":
            raise UserError(f"{finding.detail}\n{finding.fix[:1].upper()}{finding.fix[1:]}".rstrip())
    with planned(config) as (envs, folder, origin):
        shape, env = model_shape(folder, config.lora.rank), envs[0]
        if config.engine == "openrlhf":
            check_model(config, shape)
        tokenizer = load_tokenizer(folder)
        longest = check_prompts(envs, tokenizer, use_chat_template=config.chat_template)
        prompt = _prompt(config, env, tokenizer, longest)
        tools = _tools(env)
    parts: list[tuple[str, list[str]]] = [
        ("Dry run: nothing is trained, no run folder is made.", []),
        ("Settings (* differs from the default)", _settings(config)),
        ("Checks", [line for finding in findings for line in finding.as_text().splitlines()]),
        ("Data", [*(_source(name, env) for name, env in zip(("train", "eval"), envs, strict=True)), *prompt]),
        ("Tools", tools),
        ("Model", _model(config, shape, origin)),
    ]
    if config.engine == "openrlhf":
        parts += openrlhf_parts(config, shape, env.limits, start_folder(config))
    else:
        parts.append(("Memory, upper bound", _memory(config, shape, env)))
    parts.append(("Steps", _steps(config)))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


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


def _prompt(config: TrainConfig, env: TextEnv, tokenizer: Any, longest: int) -> list[str]:
    first = env.examples.examples[0]
    text = env.format.prompt(env.task, first) if isinstance(env, ToolUseEnv) else env.task.prompt(first)
    codec = make_codec(env, tokenizer, use_chat_template=config.chat_template)
    size = len(codec.prompt_ids(text, env.task.system_prompt))
    shown = textwrap.shorten(text, 600, placeholder=" ...")
    return [
        f"first prompt, {size} tokens of at most {env.limits.max_prompt_tokens}; the longest has {max(longest, size)}:",
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
    lines = [f"on {device.type}, computing in {str(dtype).removeprefix('torch.')}", *need.lines()]
    if need.host["trust region"]:
        lines.append(row("in host memory", need.host))
    if config.sampler.backend == "vllm":
        lines.append(f"in addition {config.sampler.gpu_memory:.0%} of the GPU for vLLM (sampler.gpu_memory)")
    return lines


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
