"""``--dry_run``: what a command would train, on which data, in how much memory, on which GPUs. It keeps nothing."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from sorl_env.envs.prompts import check_prompts, make_codec
from sorl_env.envs.text_env import TextEnv
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task import Example, Limits
from sorl_train.config.config_rules import remarks
from sorl_train.config.schema import as_text, flatten
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import ModelShape
from sorl_train.openrlhf.engine_limits import check_model, critic_start
from sorl_train.openrlhf.flags import Placement, as_arguments, openrlhf_flags
from sorl_train.preflight.duration import GPUS, SEATS, Plan, duration_lines
from sorl_train.preflight.inputs import PreflightContext, planned, planned_shape
from sorl_train.preflight.memory import (
    SPARE,
    Memory,
    checkpoint_size,
    estimate_cluster_memory,
    estimate_memory,
    gigabytes,
    row,
)
from sorl_train.preflight.preflight import examine
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import start_folder

H100_PLAN = Plan()
CHECKS = ("settings", "task", "data", "model", "corpus")  # those that any machine can make


def plan_text(config: TrainConfig, plan: Plan = H100_PLAN) -> str:
    """Describe a run. Raises ``UserError`` for whatever would stop it before its first step."""
    on_gpus = config.engine == "openrlhf" and config.hardware.device != "cpu"
    if plan != H100_PLAN and not on_gpus:
        raise UserError(
            "time and cost are estimated for GPUs alone: --gpu, --price and --measured need --engine openrlhf"
        )
    findings = list(examine(PreflightContext(config), CHECKS))
    for finding in findings:
        if finding.status == "fail":
            raise UserError(f"{finding.detail}\n{finding.fix[:1].upper()}{finding.fix[1:]}".rstrip())
    with planned(config) as (envs, tokenizer):
        shape, env = planned_shape(config, len(tokenizer)), envs[0]
        if config.engine == "openrlhf":
            check_model(shape, config.cluster.vllm_tensor_parallel, config.model)
        longest = check_prompts(envs, tokenizer, use_chat_template=config.chat_template)
        sizes = _prompt_sizes(env, tokenizer, config.chat_template)
        prompt = _prompt(env, sizes, longest)
        tools = _tools(env)
    what = config.algo if config.stage == "rl" else "imitation"
    parts: list[tuple[str, list[str]]] = [
        (f"Dry run of {what} on {config.task}: nothing is trained, no run folder is made.", []),
        ("Settings that differ from their defaults", _settings(flatten(config)) + remarks(config)),
        ("Checks", [line for finding in findings for line in finding.as_text().splitlines()]),
        ("Data", [*(_source(name, env) for name, env in zip(("train", "eval"), envs, strict=True)), *prompt]),
        ("Tools", tools),
        ("Model", _model(shape, config)),
    ]
    if config.engine == "openrlhf":
        gpu = GPUS[plan.gpu].memory
        memory = estimate_cluster_memory(config, shape, env.limits, gpu=gpu)
        parts += [
            ("Placement", _placement(config, start_folder(config))),
            (
                f"Memory {'per GPU' if on_gpus else 'of each process, all in host memory'}, upper bound",
                _cluster_memory(config, memory, env.limits, gpu),
            ),
            ("Memory of the host, per node", [row("together", memory.host)]),
        ]
    else:
        parts.append(("Memory, upper bound", _memory(config, shape, env.limits)))
    parts.append(("Steps", _steps(config, shape)))
    if on_gpus:
        lines = duration_lines(config, shape, env.limits, fmean(sizes), memory.cache_tokens, plan)
        parts.append(("Time and cost, estimated", lines))
    if config.engine == "openrlhf":
        parts.append(("OpenRLHF flags", _command(config, env.limits)))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


def _settings(values: Mapping[str, Any]) -> list[str]:
    defaults = flatten(TrainConfig())
    changed = [name for name, default in defaults.items() if values[name] != default]
    return [
        *(f"{name}: {as_text(values[name])}  (default {as_text(defaults[name])})" for name in changed),
        f"{len(defaults) - len(changed)} others have their defaults (sorl-train --help all)",
    ]


def _source(name: str, env: TextEnv) -> str:
    examples = env.examples
    count = f"{len(examples.examples):,} examples"
    return f"{name}: {examples.source}, split {examples.split}, {count}, sha256 {examples.sha256[:16]}"


def _prompt_sizes(env: TextEnv, tokenizer: Any, use_chat_template: bool) -> list[int]:
    """Tokens of the prompts of some examples, the first among them."""
    codec, examples = make_codec(env, tokenizer, use_chat_template=use_chat_template), env.examples.examples
    some = examples[:: -(-len(examples) // 32)]
    return [len(codec.prompt_ids(_prompt_text(env, one), env.task.system_prompt)) for one in some]


def _prompt_text(env: TextEnv, example: Example) -> str:
    return env.prompt(example) if isinstance(env, ToolUseEnv) else env.task.prompt(example)


def _prompt(env: TextEnv, sizes: list[int], longest: int) -> list[str]:
    shown = textwrap.shorten(_prompt_text(env, env.examples.examples[0]), 600, placeholder=" ...")
    head = f"first prompt, {sizes[0]} tokens of at most {env.limits.max_prompt_tokens}"
    return [
        f"{head}; the longest has {max(longest, *sizes)}:",
        *textwrap.wrap(shown, 100, initial_indent="  ", subsequent_indent="  "),
    ]


def _tools(env: TextEnv) -> list[str]:
    if not isinstance(env, ToolUseEnv):
        return ["those of its environment"]
    tools = [f"{tool.name}: {tool.description}" for tool in env.toolbox.tools]
    return [textwrap.shorten(text, 110, placeholder=" ..") for text in tools] or ["none"]


def _model(shape: ModelShape, config: TrainConfig) -> list[str]:
    lines = [
        f"policy: {_origin(config)}",
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; {shape.layers} layers of width {shape.hidden}, "
        f"{shape.vocabulary:,} words",
    ]
    if config.stage == "rl" and config.algorithm.needs_critic:
        lines.append(f"critic: {shape.critic_parameters:,} parameters")
    if config.stage == "rl" and config.loss.kl_coef > 0:
        which = config.loss.kl_model or "a frozen copy of the policy"
        lines.append(f"reference: {which} (none with loss.kl_coef=0)")
    return lines


def _origin(config: TrainConfig) -> str:
    if config.model != TINY:
        return config.model
    if Path(cached := start_folder(config)).is_dir():
        return f"tiny, cold-started by an earlier run and cached in {cached}"
    steps = f"cold-started with {config.sft.steps} supervised steps"
    return f"tiny, built for the task, {steps if config.stage == 'rl' else 'untrained'}"


def _memory(config: TrainConfig, shape: ModelShape, limits: Limits) -> list[str]:
    device, sampler = pick_device(config.hardware.device), config.sampler
    dtype = str(compute_dtype(config.hardware.dtype, device)).removeprefix("torch.")
    need = estimate_memory(config, shape, limits, device)
    lines = [f"on {device.type}, computing in {dtype}", *need.lines()]
    if need.host["trust region"]:
        lines.append(row("in host memory", need.host))
    if sampler.backend == "vllm":
        lines.append(f"in addition {sampler.gpu_memory:.0%} of the GPU for vLLM (sampler.gpu_memory)")
    return lines


def _steps(config: TrainConfig, shape: ModelShape) -> list[str]:
    rollout, update, run_dir, sft = config.rollout, config.update, config.run_dir, config.sft
    size, most = checkpoint_size(config, shape), config.checkpoint.keep + SPARE
    disk = f"a checkpoint takes {gigabytes(size)} of disk; {most} at once {gigabytes(most * size)}"
    if config.stage == "sft":
        return [f"{sft.steps} supervised steps of {sft.batch_size} demonstrations", disk]
    mini = rollout.batch_size // update.mini_batch_size
    prompts = rollout.batch_size // rollout.group_size
    each = mini * update.epochs
    exists = " (exists already)" if run_dir and Path(run_dir).exists() else ""
    return [
        f"a step collects {rollout.batch_size} trajectories: {prompts} prompts, {rollout.group_size} rollouts of each",
        f"and takes {each} optimizer steps: {update.epochs} epochs of {mini} mini-batches of {update.mini_batch_size}",
        f"{update.steps} steps: {update.steps * each:,} optimizer steps, "
        f"{update.steps * rollout.batch_size:,} trajectories",
        disk,
        f"run folder: {run_dir}{exists}",
    ]


# The settings to change when a phase does not fit, the cheapest first.
KNOBS = {
    "sampling": "cluster.vllm_memory, cluster.zero_stage=3, cluster.offload_optimizer",
    "scoring": "update.log_prob_micro_batch_size",
    "update": "update.micro_batch_size, hardware.gradient_checkpointing, cluster.offload_optimizer",
}


def _placement(config: TrainConfig, model: str) -> list[str]:
    cluster, update, place = config.cluster, config.update, Placement.of(config.cluster)
    batch, mini = config.rollout.batch_size, update.mini_batch_size
    rows = place.micro_batch(update.micro_batch_size, mini)
    engines = _count(cluster.vllm_engines, "vLLM engine")
    sampling = (
        f"{engines} x tensor parallel {cluster.vllm_tensor_parallel} = {_count(place.sample_gpus, 'GPU')}"
    )
    whose = "the same as training, in turns" if place.shared else "separate ones, while the others train"
    lines = [
        f"cluster: {_count(cluster.nodes, 'node')} x {_count(cluster.gpus_per_node, 'GPU')} = "
        f"{_count(cluster.nodes * cluster.gpus_per_node, 'GPU')}",
        f"training: {_count(place.train_nodes, 'node')} x {_count(place.train_gpus_per_node, 'GPU')} = "
        f"{_count(place.ranks, 'data-parallel rank')}, ZeRO-{cluster.zero_stage}",
        f"sampling: {sampling}, {whose}",
        f"rollout: {batch} trajectories, {batch // max(1, cluster.vllm_engines)} for each engine to sample, "
        f"{batch // place.ranks} for each rank to score",
        f"micro-batch of a GPU: {rows} (updates), "
        f"{place.micro_batch(update.log_prob_micro_batch_size, batch)} (scoring)",
        f"optimizer step: mini-batch of {mini} = {place.ranks} ranks x {rows} x "
        f"{_count(mini // place.ranks // rows, 'accumulation step')}",
    ]
    if not place.shared:
        partial = ", turns continue through weight updates" if cluster.partial_rollout else ""
        lines.append(f"staleness: at most {_count(config.rollout.max_staleness, 'training step')}{partial}")
    if config.algorithm.needs_critic:
        lines.append(critic_start(config.critic or model))
    if config.hardware.device == "cpu":
        lines.append("on a CPU: Ray counts these GPUs, but they do not exist")
    return lines


def _command(config: TrainConfig, limits: Limits) -> list[str]:
    """The command that ``openrlhf.launch`` runs, with one flag on each line."""
    run_dir = RunDir(Path(config.run_dir or "RUN_DIR"))
    flags = openrlhf_flags(config, run_dir, start_folder(config), limits, resume=None)
    folders = (
        f"SORL_RUN_DIR={shlex.quote(str(run_dir.path.absolute()))} SORL_FOLDER={shlex.quote(str(Path.cwd()))}"
    )
    words = {name: as_arguments({name: value}) for name, value in flags.items()}
    lines = [f"{folders} SORL_START=1 python -m sorl_train.openrlhf.driver"]
    lines += ["  " + shlex.join(flag) for flag in words.values() if flag]
    off = [name for name, flag in words.items() if not flag]
    notes = [f"switches that are off: {', '.join(off)}"] if off else []
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1], *notes]


def _cluster_memory(config: TrainConfig, memory: Memory, limits: Limits, room: int) -> list[str]:
    """``room`` is the memory of a GPU."""
    each = -(-config.rollout.batch_size // config.cluster.vllm_engines)  # trajectories of a step
    if config.hardware.device == "cpu":
        ranks = Placement.of(config.cluster).ranks
        lines = [*memory.lines(), f"{_count(ranks, 'rank')} on this machine"]
    else:
        lines = memory.lines(f" of {gigabytes(room)}")
        for phase in memory.phases:
            if (over := memory.total(phase) - room) > 0:
                change = next(knobs for word, knobs in KNOBS.items() if word in phase)
                lines.append(f"CAUTION: {phase!r} does not fit, {gigabytes(over)} too much: change {change}")
    full = memory.cache_tokens // limits.max_trajectory_tokens
    lines.append(
        f"vLLM takes {gigabytes(memory.vllm)}; the cache of an engine holds {memory.cache_tokens:,} tokens, {full:,} "
        f"full trajectories; a step gives it {each:,}, of which vLLM samples {min(each, SEATS)} at once"
    )
    if not memory.cache_tokens:
        lines.append(
            "CAUTION: vLLM's weights and work leave nothing for the cache: raise cluster.vllm_memory or "
            "cluster.vllm_tensor_parallel"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
