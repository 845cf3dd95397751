"""The parts of ``--dry_run`` for ``engine: openrlhf``: placement, OpenRLHF's command, memory of GPUs and hosts."""

from __future__ import annotations

import shlex
from pathlib import Path

from sorl_env.task import Limits
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import ModelShape
from sorl_train.openrlhf.checks import critic_start
from sorl_train.openrlhf.flags import Placement, as_arguments, openrlhf_flags
from sorl_train.preflight.memory import H100, Memory, estimate_cluster_memory, gigabytes, row
from sorl_train.run.folder import RunDir

Part = tuple[str, list[str]]

# The settings to change when a phase does not fit, the cheapest first.
KNOBS = {
    "sampling": "cluster.vllm_memory, cluster.zero_stage=3, cluster.offload_optimizer",
    "scoring": "update.log_prob_micro_batch_size",
    "update": "update.micro_batch_size, hardware.gradient_checkpointing, cluster.offload_optimizer",
}


def openrlhf_parts(config: TrainConfig, shape: ModelShape, limits: Limits, model: str) -> list[Part]:
    """Titles and lines for a run that loads ``model``, on H100s."""
    memory = estimate_cluster_memory(config, shape, limits)
    where = "of each process, all in host memory" if config.hardware.device == "cpu" else "per GPU"
    return [
        ("Placement", _placement(config, model)),
        ("OpenRLHF flags", _command(config, limits, model)),
        (f"Memory {where}, upper bound", _memory(config, memory, limits)),
        ("Memory of the host, per node", [row("together", memory.host)]),
    ]


def _placement(config: TrainConfig, model: str) -> list[str]:
    cluster, update, place = config.cluster, config.update, Placement.of(config)
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
        lines.append(critic_start(config, model))
    if config.hardware.device == "cpu":
        lines.append("on a CPU: Ray counts these GPUs, but they do not exist")
    return lines


def _command(config: TrainConfig, limits: Limits, model: str) -> list[str]:
    """The command that ``openrlhf.launch`` runs, with one flag on each line."""
    run_dir = RunDir(Path(config.run_dir or "RUN_DIR"))
    flags = openrlhf_flags(config, run_dir, model, limits, resume=None)
    variable = f"SORL_RUN_DIR={shlex.quote(str(run_dir.path.absolute()))}"
    words = {name: as_arguments({name: value}) for name, value in flags.items()}
    lines = [f"{variable} python -m sorl_train.openrlhf.driver"]
    lines += ["  " + shlex.join(flag) for flag in words.values() if flag]
    off = [name for name, flag in words.items() if not flag]
    notes = [f"off: {', '.join(off)}"] if off else []
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1], *notes]


def _memory(config: TrainConfig, memory: Memory, limits: Limits) -> list[str]:
    if config.hardware.device == "cpu":
        lines = [*memory.lines(), f"{_count(Placement.of(config).ranks, 'rank')} on this machine"]
    else:
        lines = memory.lines(f" of {gigabytes(H100)}")
        for phase in memory.phases:
            if (over := memory.total(phase) - H100) > 0:
                change = next(knobs for word, knobs in KNOBS.items() if word in phase)
                lines.append(f"CAUTION: {phase!r} does not fit, {gigabytes(over)} too much: change {change}")
    full = memory.cache_tokens // limits.max_trajectory_tokens
    each = -(-config.rollout.batch_size // config.cluster.vllm_engines)
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
