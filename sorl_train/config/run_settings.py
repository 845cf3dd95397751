"""Sections of ``TrainConfig`` about how a run is carried out: hardware, cluster, evaluation, alarm, files."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from sorl_env.errors import UserError
from sorl_train.config.field import (
    LOCAL,
    RESUMABLE,
    SECTION_RULES,
    Bool,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserKeys,
)

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")


def check_device(name: str) -> str:
    """The name of a possible device; whether it exists, torch says on first use. Raises ``UserError``."""
    if not _DEVICE.fullmatch(name):
        raise UserError(f"device {name!r} is unknown: use auto, cpu, cuda, cuda:1 or mps")
    return name


@dataclass(frozen=True, config=SECTION_RULES)
class HardwareConfig:
    """The device that computes, and how."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward passes; weights stay in float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Annotated[str, AfterValidator(check_device)] = "auto"
    """auto (the first GPU if there is one), cpu, mps, cuda, cuda:1."""
    gradient_checkpointing: Bool = False
    """Save memory by computing activations again in the backward pass. Paper: on."""
    threads: Annotated[NonNegativeInt, Le(1024), LOCAL, RESUMABLE] = 0
    """CPU threads of torch; 0: torch decides."""


@dataclass(frozen=True, config=SECTION_RULES)
class ClusterConfig:
    """How ``engine: openrlhf`` uses its GPUs; the local engine ignores this section."""

    nodes: PositiveInt = 1
    """Machines."""
    gpus_per_node: PositiveInt = 8
    """GPUs of each machine, for training and sampling together. Paper: 8."""
    vllm_engines: PositiveInt = 2
    """vLLM engines."""
    vllm_tensor_parallel: PositiveInt = 4
    """GPUs of one vLLM engine. Paper: 4."""
    vllm_memory: Annotated[PositiveFloat, Le(1)] = 0.6
    """Share of a GPU's memory for vLLM. Paper: 0.6."""
    zero_stage: Annotated[Int, Ge(2), Le(3)] = 3
    """DeepSpeed ZeRO stage; 2 shards optimizer and gradients, 3 also the weights."""
    offload_optimizer: Bool = True
    """Keep the optimizer state in host memory. Paper: yes."""
    offload_reference: Bool = True
    """Keep the reference model in host memory. Paper: yes."""
    async_rollout: Bool = False
    """Sample the next batch during training; needs GPUs for vLLM alone and rollout.max_staleness of at least
    1."""
    partial_rollout: Bool = False
    """With async_rollout: continue unfinished turns after a weight update."""
    deadline_s: PositiveFloat = 3600.0
    """Stop with an error after this many seconds without a step, a checkpoint or progress at start-up."""
    flags: UserKeys = field(default_factory=dict)
    """More flags for OpenRLHF, as {ds.overlap_comm: true}; docs/scaling_out.md lists the allowed ones."""


@dataclass(frozen=True, config=SECTION_RULES)
class EvalConfig:
    """Evaluation before, during and after training."""

    every: Annotated[NonNegativeInt, RESUMABLE] = 10
    """Training steps between evaluations; 0: only before and after training."""
    split: str = "test"
    """Split of the evaluation data."""
    num_examples: Annotated[PositiveInt, RESUMABLE] = 256
    """Examples of an evaluation during training, a seeded sample."""
    num_examples_final: Annotated[PositiveInt, RESUMABLE] = 1000
    """Examples of the first and the last evaluation."""
    patience: Annotated[NonNegativeInt, RESUMABLE] = 0
    """Stop after this many consecutive evaluations below half of the best success; 0: never."""
    temperature: Annotated[NonNegativeFloat, RESUMABLE] = 0.0
    """Sampling temperature in evaluation; 0: greedy."""
    search_off: Annotated[Bool, RESUMABLE] = False
    """At the end evaluate once more with search tools that find nothing."""


@dataclass(frozen=True, config=SECTION_RULES)
class AlarmConfig:
    """The collapse alarm: limits of five signals, and what to do when one exceeds its limit.

    ``strain`` is the early warning and the limit to set; the other signals are means over three training steps, for
    sudden changes.
    """

    action: Literal["off", "warn", "stop"] = "warn"
    """warn: print a message and write events.jsonl; stop: also save, end the run and say what to do next."""
    strain: PositiveFloat = 0.07
    """Limit of the running mean (over about 50 steps, each counted as at most 0.3) of the RMS log-ratio to
    the old policy; raise it for runs that are far off-policy on purpose."""
    ratio_tail: PositiveFloat = 0.5
    """Limit of the RMS log-ratio to the old policy, over three steps."""
    invalid_turns: PositiveFloat = 0.25
    """Limit of the fall of the share of valid turns below its best, beyond chance."""
    grad_norm: PositiveFloat = 15.0
    """Limit of the gradient norm over the highest of the first steps."""
    entropy: PositiveFloat = 2.0
    """Limit of the log of the entropy over the entropy of the first steps, up or down."""


@dataclass(frozen=True, config=SECTION_RULES)
class CheckpointConfig:
    """Checkpoints hold everything that is needed to resume exactly."""

    every: Annotated[NonNegativeInt, RESUMABLE] = 10
    """Training steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: Annotated[PositiveInt, RESUMABLE] = 2
    """Newest checkpoints to keep, besides the best one."""


@dataclass(frozen=True, config=SECTION_RULES)
class LogConfig:
    """Where metrics go in addition to metrics.jsonl."""

    tensorboard: Annotated[Bool, RESUMABLE] = True
    """Write TensorBoard events."""
    wandb: Annotated[str | None, RESUMABLE] = None
    """Weights & Biases project; needs the wandb package."""
