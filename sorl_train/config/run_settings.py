"""Sections of ``TrainConfig`` about how a run is carried out: hardware, cluster, evaluation, alarm, files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from sorl_train.config.field import opt

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True)
class HardwareConfig:
    """The device that computes, and how."""

    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto",
        "precision of forward passes; weights stay in float32. auto: bfloat16 on a GPU, float32 on a CPU",
    )
    device: str = opt("auto", "auto (the first GPU if there is one), cpu, mps, cuda, cuda:1")
    gradient_checkpointing: bool = opt(
        False, "save memory by computing activations again in the backward pass", paper="on"
    )
    threads: int = opt(0, "CPU threads of torch; 0: torch decides", low=0, high=1024)


def device_problem(name: str) -> str | None:
    """What is wrong with the name of a device; None for a possible one. Whether it exists, torch says on first use."""
    return None if _DEVICE.fullmatch(name) else f"{name!r} is unknown: use auto, cpu, cuda, cuda:1 or mps"


@dataclass(frozen=True)
class ClusterConfig:
    """How ``engine: openrlhf`` uses its GPUs; the local engine ignores this section."""

    nodes: int = opt(1, "machines", low=1)
    gpus_per_node: int = opt(8, "GPUs of each machine, for training and sampling together", paper="8", low=1)
    vllm_engines: int = opt(2, "vLLM engines", low=1)
    vllm_tensor_parallel: int = opt(4, "GPUs of one vLLM engine", paper="4", low=1)
    vllm_memory: float = opt(0.6, "share of a GPU's memory for vLLM", paper="0.6", above=0, high=1)
    zero_stage: int = opt(
        3, "DeepSpeed ZeRO stage; 2 shards optimizer and gradients, 3 also the weights", low=2, high=3
    )
    offload_optimizer: bool = opt(True, "keep the optimizer state in host memory", paper="yes")
    offload_reference: bool = opt(True, "keep the reference model in host memory", paper="yes")
    async_rollout: bool = opt(
        False,
        "sample the next batch during training; needs GPUs for vLLM alone and rollout.max_staleness of at least 1",
    )
    partial_rollout: bool = opt(False, "with async_rollout: continue unfinished turns after a weight update")
    deadline_s: float = opt(
        3600.0,
        "stop with an error after this many seconds without a step, a checkpoint or progress at start-up",
        above=0,
    )
    flags: dict[str, Any] = opt(
        {}, "more flags for OpenRLHF, as {ds.overlap_comm: true}; docs/scaling_out.md lists the allowed ones"
    )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation before, during and after training."""

    every: int = opt(10, "training steps between evaluations; 0: only before and after training", low=0)
    split: str = opt("test", "split of the evaluation data")
    num_examples: int = opt(256, "examples of an evaluation during training, a seeded sample", low=1)
    num_examples_final: int = opt(1000, "examples of the first and the last evaluation", low=1)
    patience: int = opt(
        0, "stop after this many consecutive evaluations below half of the best success; 0: never", low=0
    )
    temperature: float = opt(0.0, "sampling temperature in evaluation; 0: greedy", low=0)
    search_off: bool = opt(False, "at the end evaluate once more with search tools that find nothing")


@dataclass(frozen=True)
class AlarmConfig:
    """The collapse alarm: limits of five signals, and what to do when one exceeds its limit.

    ``strain`` is the early warning and the limit to set; the other signals are means over three training steps, for
    sudden changes.
    """

    action: Literal["off", "warn", "stop"] = opt(
        "warn",
        "warn: print a message and write events.jsonl; stop: also save, end the run and say what to do next",
    )
    strain: float = opt(
        0.07,
        "limit of the running mean (over about 50 steps, each counted as at most 0.3) of the RMS log-ratio to the old "
        "policy; raise it for runs that are far off-policy on purpose",
        above=0,
    )
    ratio_tail: float = opt(0.5, "limit of the RMS log-ratio to the old policy, over three steps", above=0)
    invalid_turns: float = opt(
        0.25, "limit of the fall of the share of valid turns below its best, beyond chance", above=0
    )
    grad_norm: float = opt(15.0, "limit of the gradient norm over the highest of the first steps", above=0)
    entropy: float = opt(
        2.0, "limit of the log of the entropy over the entropy of the first steps, up or down", above=0
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints hold everything that is needed to resume exactly."""

    every: int = opt(10, "training steps between checkpoints; 0: only at the end and on Ctrl-C", low=0)
    keep: int = opt(2, "newest checkpoints to keep, besides the best one", low=1)


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go in addition to metrics.jsonl."""

    tensorboard: bool = opt(True, "write TensorBoard events")
    wandb: str | None = opt(None, "Weights & Biases project; needs the wandb package")
