"""``--dry_run``: what a command would train, on which data, in how much memory, on which GPUs. It keeps nothing."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sorl_env.envs.prompts import check_prompts, make_codec
from sorl_env.envs.text_env import TextEnv
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task import Limits
from sorl_train.config.config_rules import remarks
from sorl_train.config.run_settings import RolloutConfig
from sorl_train.config.schema import as_text, flatten
from sorl_train.config.settings import TINY, SamplerConfig, TrainConfig, UpdateConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import ModelShape
from sorl_train.openrlhf.engine_limits import check_model, critic_start
from sorl_train.openrlhf.flags import Placement, as_arguments, openrlhf_flags
from sorl_train.preflight.inputs import PreflightContext, planned, planned_shape
from sorl_train.preflight.memory import H100, Memory, estimate_cluster_memory, estimate_memory, gigabytes, row
from sorl_train.preflight.preflight import examine
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import start_folder

CHECKS = ("settings", "task", "data", "model", "corpus")  # those that any machine can make


def plan_text(config: TrainConfig) -> str:
    """Describe a run. Raises ``UserError`` for whatever would stop it before its first step."""
    findings = list(examine(PreflightContext(config), CHECKS))
    for finding in findings:
        if finding.status == "fail":
            raise UserError(f"{finding.detail}\n{finding.fix[:1].upper()}{finding.fix[1:]}".rstrip())
    with planned(config) as (envs, tokenizer):
        shape, env = planned_shape(config, len(tokenizer)), envs[0]
        if config.engine == "openrlhf":
            check_model(shape, config.cluster.vllm_tensor_parallel, config.model)
        longest = check_prompts(envs, tokenizer, use_chat_template=config.chat_template)
        prompt = _prompt(env, tokenizer, config.chat_template, longest)
        tools = _tools(env)
    parts: list[tuple[str, list[str]]] = [
        ("Dry run: nothing is trained, no run folder is made.", []),
        ("Settings (* differs from the default)", _settings(flatten(config)) + remarks(config)),
        ("Checks", [line for finding in findings for line in finding.as_text().splitlines()]),
        ("Data", [*(_source(name, env) for name, env in zip(("train", "eval"), envs, strict=True)), *prompt]),
        ("Tools", tools),
        ("Model", _model(shape, config)),
    ]
    if config.stage == "rl" and config.algorithm.needs_critic:
        parts[-1][1].append(f"critic: {shape.critic_parameters:,} parameters")
    if config.stage == "rl" and config.loss.kl_coef > 0:
        which = config.loss.kl_model or "a frozen copy of the policy"
        parts[-1][1].append(f"reference: {which} (none with loss.kl_coef=0)")
    if config.engine == "openrlhf":
        memory, model = estimate_cluster_memory(config, shape, env.limits), start_folder(config)
        run_dir, on_cpu = RunDir(Path(config.run_dir or "RUN_DIR")), config.hardware.device == "cpu"
        where = "of each process, all in host memory" if on_cpu else "per GPU"
        ranks = Placement.of(config.cluster).ranks if on_cpu else 0
        each = -(-config.rollout.batch_size // config.cluster.vllm_engines)
        parts += [
            ("Placement", _placement(config, model)),
            (
                "OpenRLHF flags",
                _command(run_dir, openrlhf_flags(config, run_dir, model, env.limits, resume=None)),
            ),
            (f"Memory {where}, upper bound", _cluster_memory(memory, env.limits, ranks, each)),
            ("Memory of the host, per node", [row("together", memory.host)]),
        ]
    else:
        device = pick_device(config.hardware.device)
        dtype = compute_dtype(config.hardware.dtype, device)
        need = estimate_memory(config, shape, env.limits, dtype.itemsize)
        head = f"on {device.type}, computing in {str(dtype).removeprefix('torch.')}"
        parts.append(("Memory, upper bound", [head, *_memory(need, config.sampler)]))
    sft = f"{config.sft.steps} supervised steps of {config.sft.batch_size} demonstrations"
    steps = [sft] if config.stage == "sft" else _steps(config.rollout, config.update, config.run_dir)
    parts.append(("Steps", steps))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts)


def _settings(values: Mapping[str, Any]) -> list[str]:
    return [
        f"  {name}: {as_text(values[name])}"
        if values[name] == default
        else f"* {name}: {as_text(values[name])}  (default {as_text(default)})"
        for name, default in flatten(TrainConfig()).items()
    ]


def _source(name: str, env: TextEnv) -> str:
    examples = env.examples
    count = f"{len(examples.examples):,} examples"
    return f"{name}: {examples.source}, split {examples.split}, {count}, sha256 {examples.sha256[:16]}"


def _prompt(env: TextEnv, tokenizer: Any, use_chat_template: bool, longest: int) -> list[str]:
    first = env.examples.examples[0]
    text = env.prompt(first) if isinstance(env, ToolUseEnv) else env.task.prompt(first)
    codec = make_codec(env, tokenizer, use_chat_template=use_chat_template)
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


def _model(shape: ModelShape, config: TrainConfig) -> list[str]:
    return [
        f"policy: {_origin(config)}",
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; {shape.layers} layers of width {shape.hidden}, "
        f"{shape.vocabulary:,} words",
    ]


def _origin(config: TrainConfig) -> str:
    if config.model != TINY:
        return config.model
    if Path(cached := start_folder(config)).is_dir():
        return f"tiny, cold-started by an earlier run and cached in {cached}"
    steps = f"cold-started with {config.sft.steps} supervised steps"
    return f"tiny, built for the task, {steps if config.stage == 'rl' else 'untrained'}"


def _memory(need: Memory, sampler: SamplerConfig) -> list[str]:
    lines = need.lines()
    if need.host["trust region"]:
        lines.append(row("in host memory", need.host))
    if sampler.backend == "vllm":
        lines.append(f"in addition {sampler.gpu_memory:.0%} of the GPU for vLLM (sampler.gpu_memory)")
    return lines


def _steps(rollout: RolloutConfig, update: UpdateConfig, run_dir: str | None) -> list[str]:
    mini = rollout.batch_size // update.mini_batch_size
    prompts = rollout.batch_size // rollout.group_size
    each = mini * update.epochs
    exists = " (exists already)" if run_dir and Path(run_dir).exists() else ""
    return [
        f"a step collects {rollout.batch_size} trajectories: {prompts} prompts, {rollout.group_size} rollouts of each",
        f"and takes {each} optimizer steps: {update.epochs} epochs of {mini} mini-batches of {update.mini_batch_size}",
        f"{update.steps} steps: {update.steps * each:,} optimizer steps, "
        f"{update.steps * rollout.batch_size:,} trajectories",
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


def _command(run_dir: RunDir, flags: Mapping[str, Any]) -> list[str]:
    """The command that ``openrlhf.launch`` runs, with one flag on each line."""
    variable = f"SORL_RUN_DIR={shlex.quote(str(run_dir.path.absolute()))}"
    words = {name: as_arguments({name: value}) for name, value in flags.items()}
    lines = [f"{variable} python -m sorl_train.openrlhf.driver"]
    lines += ["  " + shlex.join(flag) for flag in words.values() if flag]
    off = [name for name, flag in words.items() if not flag]
    notes = [f"off: {', '.join(off)}"] if off else []
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1], *notes]


def _cluster_memory(memory: Memory, limits: Limits, ranks: int, each: int) -> list[str]:
    """``ranks`` on a CPU, or 0; ``each`` is the number of trajectories that a vLLM engine gets in a step."""
    if ranks:
        lines = [*memory.lines(), f"{_count(ranks, 'rank')} on this machine"]
    else:
        lines = memory.lines(f" of {gigabytes(H100)}")
        for phase in memory.phases:
            if (over := memory.total(phase) - H100) > 0:
                change = next(knobs for word, knobs in KNOBS.items() if word in phase)
                lines.append(f"CAUTION: {phase!r} does not fit, {gigabytes(over)} too much: change {change}")
    full = memory.cache_tokens // limits.max_trajectory_tokens
    lines.append(
        f"vLLM takes {gigabytes(memory.vllm)}; the cache of an engine holds {memory.cache_tokens:,} tokens, {full:,} "
        f"full trajectories; a step gives it {each:,}"
    )
    if not memory.cache_tokens:
        lines.append(
            "CAUTION: vLLM's weights and work leave nothing for the cache: raise cluster.vllm_memory or "
            "cluster.vllm_tensor_parallel"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
