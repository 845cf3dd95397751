"""Bounds of a run's time with OpenRLHF, by a roofline: the work of each phase over a share of what GPUs can do.

P parameters, n layers of width h; trajectories of L tokens, A of them the policy's.

- A forward pass takes 2 P + 2 n h L FLOPs a token (the second term is causal attention), an update three times as many,
  four times with gradient checkpointing. Policy, critic and reference score all tokens; policy and critic update on all
  of them, ``update.epochs`` times. Micro-batches are sorted by length, so padding is left out.
- An engine reads prompts and observations once (prefixes are cached), which FLOPs limit, and decodes at most SEATS
  trajectories at once. Each step of it reads all weights and the keys and values of these trajectories, which bandwidth
  limits. A batch ends with its longest trajectory, ``tail`` times the mean or at the limit; an asynchronous run that
  continues turns through updates has no such end.
- Offloaded Adam moves 32 bytes a parameter through host memory in each optimizer step; models that take turns on a GPU
  move over its link to the host, as do new weights.
- A checkpoint has 14 bytes for each parameter of policy and critic, and 2 for the policy alone.

Not counted: start, downloads, a retriever that is too slow, a slow network between nodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sorl_env.errors import UserError, did_you_mean
from sorl_env.task import Limits
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import ModelShape
from sorl_train.openrlhf.flags import Placement
from sorl_train.preflight.memory import checkpoint_size
from sorl_train.run.files import read_jsonl

SEATS = 128  # SchedulerConfig.DEFAULT_MAX_NUM_SEQS of vLLM 0.29, which OpenRLHF 0.11.2 has no flag for


class Gpu(NamedTuple):
    """The highest bfloat16 FLOP/s without sparsity, bytes/s of its memory, and bytes of it."""

    flops: float
    bandwidth: float
    memory: int


# NVIDIA's data sheets of the SXM modules; H20 as in verl's published runs
GPUS = {
    "H100": Gpu(989e12, 3.35e12, 80_000_000_000),
    "H200": Gpu(989e12, 4.8e12, 141_000_000_000),
    "A100-80": Gpu(312e12, 2.039e12, 80_000_000_000),
    "H20": Gpu(148e12, 4.0e12, 96_000_000_000),
}

# By unit: at best, expected, at worst. prime-rl's published MFU, 11 to 35%, leaves out the FLOPs of recomputing, which
# count here: .15 to .47.
UNITS: dict[str, dict[str, tuple[float, float, float]]] = {
    "share of {flops:.0f} TFLOP/s reached": {
        "mfu_update": (0.5, 0.3, 0.1),
        "mfu_score": (0.5, 0.3, 0.1),
        "mfu_prefill": (0.6, 0.4, 0.15),
    },
    "share of {bandwidth:.2f} TB/s reached": {"decode_bandwidth": (0.8, 0.5, 0.25)},
    "seconds": {
        "decode_step_s": (0.001, 0.004, 0.015),  # beside reading: launches, all-reduce, scheduler, sampler
        "tool_s": (0.05, 0.5, 5.0),  # of one call
        "other_s": (1.0, 5.0, 20.0),  # of a step: Ray, collation, metrics
    },
    "GB/s": {
        "link_gb_s": (50.0, 20.0, 2.0),  # between a GPU and its host, or from trainer to engine
        "host_gb_s": (200.0, 80.0, 20.0),  # of a node's memory, by its ranks together
        "disk_gb_s": (5.0, 1.0, 0.2),
    },
    "longest trajectory over the mean one, up to its limits": {"tail": (1.5, 3.0, 1000.0)},
}
ASSUMED = {name: values for figures in UNITS.values() for name, values in figures.items()}
LENGTHS = {  # what a run logs about trajectories, and its name here
    "rollout/num_turns": "turns",
    "rollout/response_tokens": "response_tokens",
    "rollout/observation_tokens": "observation_tokens",
}


@dataclass(frozen=True)
class Plan:
    """What ``--dry_run`` is told beside the settings: the GPU's name, the price of an hour of one, and measured figures
    by their names in ``ASSUMED`` and ``LENGTHS``. The constructor raises ``UserError`` for a GPU that is not known."""

    gpu: str = "H100"
    price: float | None = None
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise UserError(f"--gpu {self.gpu}: there are no figures of it. {did_you_mean(self.gpu, GPUS)}")


def read_measured(path: Path) -> dict[str, float]:
    """The figures of a JSON file that are in ``ASSUMED`` or ``LENGTHS``, or the lengths of a run folder's later half.
    Raises ``UserError`` if there are none, or one is not a number above 0."""
    try:
        if path.is_dir():
            rows = [row for row in read_jsonl(path / "metrics.jsonl") if all(name in row for name in LENGTHS)]
            later = rows[len(rows) // 2 :]
            given = {name: fmean(row[metric] for row in later) for metric, name in LENGTHS.items() if later}
        else:
            given = dict(json.loads(path.read_text(encoding="utf-8")))
        found = {name: float(given[name]) for name in (*ASSUMED, *LENGTHS.values()) if name in given}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--measured {path} cannot be read: {error}") from error
    if not found or any(value <= 0 for name, value in found.items() if name != "observation_tokens"):
        names = ", ".join((*ASSUMED, *LENGTHS.values()))
        raise UserError(f"--measured {path}: it needs one of these at least, above 0: {names}")
    return found


@dataclass(frozen=True)
class Duration:
    """Seconds, unless the name says otherwise: of the phases of a step, of a step, and of the whole run."""

    trajectory_tokens: float
    response_tokens: float
    turns: float
    phases: dict[str, float]
    step: float
    evaluations: float
    checkpoints: float
    run: float
    sampled_per_s: float  # tokens, while it samples
    calls_per_s: float  # of tools, while it samples


def assumed(limits: Limits, plan: Plan, column: int) -> dict[str, float]:
    """The figures of one column, with what was measured in the place of what is assumed."""
    few, most = min(2, limits.max_turns), limits.max_turns
    turns = plan.measured.get("turns", (few, (few + most) / 2, most)[column])
    lengths = {
        "turns": turns,
        "response_tokens": turns * limits.max_new_tokens * (0.15, 0.3, 1.0)[column],
        "observation_tokens": (turns - 1) * limits.max_observation_tokens * (0.5, 0.9, 1.0)[column],
    }
    return {name: values[column] for name, values in ASSUMED.items()} | lengths | dict(plan.measured)


def estimate_duration(
    config: TrainConfig,
    shape: ModelShape,
    limits: Limits,
    prompt_tokens: float,
    cache_tokens: int,
    given: Mapping[str, float],
    gpu: Gpu,
) -> Duration:
    """The run's time with the figures ``given``; ``cache_tokens`` fit into an engine."""
    update, batch = config.update, config.rollout.batch_size
    room = max(1.0, limits.max_trajectory_tokens - prompt_tokens)
    fit = min(1.0, room / (given["response_tokens"] + given["observation_tokens"]))
    response, observation = given["response_tokens"] * fit, given["observation_tokens"] * fit
    tokens = prompt_tokens + response + observation
    longest = min(given["tail"] * response, limits.max_turns * limits.max_new_tokens, room)
    forward = 2 * shape.parameters + 2 * shape.layers * shape.hidden * tokens  # FLOPs of a token
    flows = config.cluster.async_rollout and config.cluster.partial_rollout
    parallel, engines = config.cluster.vllm_tensor_parallel, config.cluster.vllm_engines

    def sampling(count: float) -> float:
        """Seconds in which all engines together sample ``count`` trajectories."""
        each = max(1.0, count / engines)
        flops, bandwidth = parallel * gpu.flops, gpu.bandwidth * given["decode_bandwidth"]
        heads = min(parallel, shape.key_value_heads)  # with fewer heads than GPUs, GPUs hold copies
        kept = 4 * shape.layers * shape.key_value_width / heads  # bytes of a token's keys and values on a GPU
        at_once = max(1.0, min(each, SEATS, cache_tokens / tokens))
        steps = response * each / at_once + (0.0 if flows else max(0.0, longest - response))
        context = (prompt_tokens + tokens) / 2
        reads = steps * 2 * shape.parameters / parallel + response * each * context * kept
        drawing = response * each * forward / flops / given["mfu_prefill"]
        prefill = (prompt_tokens + observation) * each * forward / flops / given["mfu_prefill"]
        tools = 0.0 if flows else (given["turns"] - 1) * given["tool_s"]
        return prefill + max(reads / bandwidth, drawing) + steps * given["decode_step_s"] + tools

    phases = {"sampling": sampling(batch), **_training(config, shape, batch * tokens * forward, given, gpu)}
    training = sum(phases.values()) - phases["sampling"]
    step = max(phases["sampling"], training) if config.cluster.async_rollout else sum(phases.values())
    during = (update.steps - 1) // config.eval.every if config.eval.every else 0
    finals = (2 + config.eval.search_off) * sampling(config.eval.num_examples_final)
    evaluations = during * sampling(config.eval.num_examples) + finals
    saves = 1 + (update.steps - 1) // config.checkpoint.every if config.checkpoint.every else 1
    checkpoints = saves * checkpoint_size(config, shape) / given["disk_gb_s"] / 1e9
    busy = step if config.cluster.async_rollout else phases["sampling"]
    return Duration(
        trajectory_tokens=tokens,
        response_tokens=response,
        turns=given["turns"],
        phases=phases,
        step=step,
        evaluations=evaluations,
        checkpoints=checkpoints,
        run=update.steps * step + evaluations + checkpoints,
        sampled_per_s=batch * response / busy,
        calls_per_s=batch * (given["turns"] - 1) / busy,
    )


def _training(
    config: TrainConfig, shape: ModelShape, flops: float, given: Mapping[str, float], gpu: Gpu
) -> dict[str, float]:
    """Seconds of the phases beside sampling. The policy's forward pass over the batch takes ``flops``."""
    cluster, update, place = config.cluster, config.update, Placement.of(config.cluster)
    policy, critic = shape.parameters, shape.critic_parameters if config.algorithm.needs_critic else 0
    trained = 1 + critic / policy  # models, in units of the policy
    scored = trained + (config.loss.kl_coef > 0)
    work = flops / (place.ranks * gpu.flops)
    passes = 4 if config.hardware.gradient_checkpointing else 3
    # vLLM's weights, as it sleeps
    optimizer, moved = 0.0, 2 * policy / cluster.vllm_tensor_parallel if place.shared else 0.0
    if cluster.offload_optimizer:
        steps = update.epochs * -(-config.rollout.batch_size // update.mini_batch_size)
        optimizer = steps * 32 * (policy + critic) / place.train_nodes / given["host_gb_s"] / 1e9
    elif place.shared:
        moved += 2 * 12 * (policy + critic) / place.ranks
    return {
        "scoring": scored * work / given["mfu_score"],
        "update": passes * update.epochs * trained * work / given["mfu_update"] + optimizer,
        "weights to vLLM": (2 * policy + moved) / given["link_gb_s"] / 1e9,
        "other": given["other_s"],
    }


def duration_lines(
    config: TrainConfig,
    shape: ModelShape,
    limits: Limits,
    prompt_tokens: float,
    cache_tokens: int,
    plan: Plan,
) -> list[str]:
    """The three estimates side by side, and what they rest on."""
    gpu, gpus = GPUS[plan.gpu], Placement.of(config.cluster).gpus
    columns = [assumed(limits, plan, column) for column in range(3)]
    found = [estimate_duration(config, shape, limits, prompt_tokens, cache_tokens, c, gpu) for c in columns]
    rows = [
        ("", ["at best", "expected", "at worst"]),
        ("turns of a trajectory", [f"{one.turns:.1f}" for one in found]),
        ("tokens of it, with the prompt", [f"{one.trajectory_tokens:,.0f}" for one in found]),
        ("tokens that the policy samples", [f"{one.response_tokens:,.0f}" for one in found]),
        *((f"{name}, each step", [_readable(one.phases[name]) for one in found]) for name in found[0].phases),
        ("a step", [_readable(one.step) for one in found]),
        ("all evaluations", [_readable(one.evaluations) for one in found]),
        ("all checkpoints", [_readable(one.checkpoints) for one in found]),
        (f"the run, {config.update.steps:,} steps", [_readable(one.run) for one in found]),
        (f"GPU-hours of {gpus} {plan.gpu}", [f"{gpus * one.run / 3600:,.0f}" for one in found]),
        ("tokens sampled a second", [f"{one.sampled_per_s:,.0f}" for one in found]),
        ("tool calls a second", [f"{one.calls_per_s:,.0f}" for one in found]),
    ]
    if plan.price is not None:
        cost = [f"{plan.price * gpus * one.run / 3600:,.0f}" for one in found]
        rows.insert(-2, (f"cost at {plan.price:g} a GPU-hour", cost))
    lines = [f"{name:<30}{''.join(f'{value:>11}' for value in values)}" for name, values in rows]
    if config.cluster.async_rollout:
        idle = 1 - found[1].phases["sampling"] / found[1].step
        whose = (
            f"vLLM's GPUs wait for {idle:.0%} of it" if idle > 0 else "the trainer's GPUs wait for the rest"
        )
        lines.append(f"a step takes the longer of sampling and the other phases; as expected, {whose}")
    measured = ", ".join(f"{name} {value:g}" for name, value in plan.measured.items())
    how = "nothing. --measured FILE replaces assumptions: JSON with their names, or a run folder for the lengths"
    lines += [f"measured: {measured or how}", "assumed, at best/expected/at worst:"]
    for unit, names in UNITS.items():
        texts = [
            f"{n} {'/'.join(f'{given[n]:g}' for given in columns)}" for n in names if n not in plan.measured
        ]
        peak = unit.format(flops=gpu.flops / 1e12, bandwidth=gpu.bandwidth / 1e12)
        lines += [f"  {peak}: {', '.join(texts)}"] if texts else []
    return lines


def _readable(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
