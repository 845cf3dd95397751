"""Sections of ``TrainConfig`` beside the objective, and what the fields of all sections are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Strict
from pydantic.dataclasses import dataclass

from sorl_env.errors import MOST, UserError, did_you_mean
from sorl_train.algorithms import Algorithm, CorrectionMode, RatioLevel

SECTION_RULES = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

# pydantic's own types of these names take True for 1 and "3" for 3
Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict(), Le(MOST)]
PositiveInt = Annotated[Int, Ge(1)]
NonNegativeInt = Annotated[Int, Ge(0)]
Float = Annotated[float, Strict()]
PositiveFloat = Annotated[Float, Gt(0)]
NonNegativeFloat = Annotated[Float, Ge(0)]
Share = Annotated[Float, Ge(0), Le(1)]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
UserKeys = dict[Annotated[str, BeforeValidator(str)], Any]  # a mapping whose keys the user chooses
_T = TypeVar("_T")
# one whose lines are all commented out is None
Section = Annotated[_T, BeforeValidator(lambda value: {} if value is None else value)]


class Resumable(NamedTuple):
    """The setting may change when a run is resumed: it alters no step already taken."""


class Common(NamedTuple):
    """Most runs touch the setting: a bare ``--help`` shows it, below this heading."""

    heading: str


class LocalOnly(NamedTuple):
    """engine=openrlhf refuses all values of the setting but ``others``; ``why`` ends the message."""

    others: tuple[Any, ...]
    why: str


class Needs(NamedTuple):
    """Only some runs read the setting: what they need, and whether a run has it, given the values of all settings."""

    text: str
    is_met: Callable[[Algorithm, Mapping[str, Any]], bool]


def needs(name: str, *values: str) -> Needs:
    """The setting ``name`` has to have one of ``values``; without any, it has to be given and not 0."""
    if values:
        return Needs(f"{name}={' or '.join(values)}", lambda _, given: given[name] in values)
    return Needs(name, lambda _, given: given[name] not in (None, 0))


RESUMABLE = Resumable()
TRAINED = Common("what is trained, on what")
STEPS = Common("how a step is taken")
PLACE = Common("where it runs, and what it writes")
CRITIC = Needs("a critic", lambda row, _: row.needs_critic)
GROUPS = Needs("groups to compare", lambda row, _: row.needs_groups)
TOTAL_REWARDS = Needs("advantages of the kind group", lambda row, _: row.advantage == "group")
TURNS = Needs("turns to compare", lambda row, _: row.advantage in ("turn_group", "state_group"))
STATES = Needs("states to compare", lambda row, _: row.advantage == "state_group")
CRITIC_OR_STATES = Needs(
    "a critic or states to compare", lambda row, _: row.advantage in ("gae", "state_group")
)
NORMALIZED = Needs("normalized steps", lambda row, _: row.normalize)
# a surrogate from outside, whose name is None, may read what it likes
PPO_CLIP = Needs("PPO's clip", lambda row, _: row.surrogate_name in ("clipped", None))
SAPO_GATE = Needs("sapo's gate", lambda row, _: row.surrogate_name in ("sapo", None))
LOCAL = needs("engine", "local")


FILTERED_STOPS = ("max_tokens", "max_turns", "max_seconds", "invalid")  # what ``overlong.exclude`` may name
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _check_stops(text: str) -> str:
    for name in sorted(_names(text) - set(FILTERED_STOPS)):
        raise ValueError(
            f"{name!r} is not a stop reason to leave out (those that end with 'error' or 'aborted' are in no loss "
            f"anyway). {did_you_mean(name, FILTERED_STOPS)}"
        )
    return text


def check_device(name: str) -> str:
    """The name of a possible device; whether it exists, torch says on first use. Raises ``UserError``."""
    if not _DEVICE.fullmatch(name):
        raise UserError(f"device {name!r} is unknown: use auto, cpu, cuda or cuda:1")
    return name


@dataclass(frozen=True, config=SECTION_RULES)
class LoraConfig:
    """LoRA adapters (with the package peft) in place of training all weights."""

    rank: Annotated[NonNegativeInt, Le(65536), LocalOnly((0,), ": use 0")] = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: Annotated[PositiveInt, needs("lora.rank")] = 32
    """Scale of the adapters: they are multiplied by alpha / rank."""


@dataclass(frozen=True, config=SECTION_RULES)
class TinyConfig:
    """Sizes of the policy that ``model: tiny`` builds for the task."""

    hidden_size: Annotated[PositiveInt, Le(65536)] = 96
    """Width of the hidden states."""
    num_layers: Annotated[PositiveInt, Le(65536)] = 3
    """Transformer blocks."""
    num_heads: Annotated[PositiveInt, Le(65536)] = 4
    """Attention heads; they split hidden_size into parts of even width."""


@dataclass(frozen=True, config=SECTION_RULES)
class SftConfig:
    """Supervised fine-tuning on demonstrations: ``--stage sft``, and the cold start of ``model: tiny``."""

    demos: str | None = None
    """JSONL or Parquet file of trajectories or chat messages; None: the task's scripted expert plays them."""
    num_demos: PositiveInt = 4000
    """Demonstrations that the expert plays."""
    steps: PositiveInt = 300
    """Optimizer steps."""
    batch_size: PositiveInt = 24
    """Demonstrations in one optimizer step."""
    micro_batch_size: PositiveInt = 24
    """Demonstrations in one forward pass."""
    lr: PositiveFloat = 1e-5
    """Highest learning rate; it falls as a cosine to a tenth."""
    warmup_ratio: Share = 0.05
    """Share of the steps in which the rate rises."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient."""


@dataclass(frozen=True, config=SECTION_RULES)
class RolloutConfig:
    """What one training step collects."""

    batch_size: Annotated[PositiveInt, STEPS] = 512
    """Trajectories in one training step. Paper: 512."""
    group_size: Annotated[PositiveInt, STEPS] = 1
    """Rollouts of each prompt; group advantages need 2 or more. It divides batch_size."""
    dynamic_sampling: Annotated[
        NonNegativeInt, Le(1000), LocalOnly((0,), ", OpenRLHF hands out a fixed list of prompts: use 0")
    ] = 0
    """Replace groups whose rewards are all equal with groups of other prompts, in at most this many further
    rounds (DAPO); 0: off."""
    max_staleness: NonNegativeInt = 0
    """Train on trajectories that were sampled this many training steps ago; 0: on the newest."""
    save_every: Annotated[PositiveInt, RESUMABLE] = 10
    """Write the trajectories of every n-th training step, and of the first and the last."""


@dataclass(frozen=True, config=SECTION_RULES)
class ReplayConfig:
    """A buffer of past trajectories, which join the new rollouts of the same question."""

    size: Annotated[NonNegativeInt, LocalOnly((0,), ", whose checkpoints hold the buffer: use 0")] = 0
    """Trajectories in the buffer, from which the oldest are dropped; 0: no replay."""
    mode: Annotated[Literal["success", "recent"], needs("replay.size")] = "success"
    """success: where all rollouts of a question fail, past successes take the place of some of them (ARPO);
    recent: the newest past rollouts of a question join its new ones, whatever their rewards (RePO)."""
    per_group: Annotated[PositiveInt, needs("replay.size")] = 1
    """Most past trajectories in one group."""
    max_age: Annotated[PositiveInt, needs("replay.size")] = 100
    """Replay trajectories whose weights are at most this many training steps old; drop older ones."""


@dataclass(frozen=True, config=SECTION_RULES)
class CorrectionConfig:
    """Weights of the policy loss that correct for a sampler whose log-probabilities are not the trainer's."""

    mode: CorrectionMode = "none"
    """What becomes of w = trainer's probability / sampler's: truncate (TIS) takes min(w, high), band (IcePop)
    takes w inside [low, high] and 0 outside."""
    level: Annotated[Literal["auto", RatioLevel], needs("correction.mode", "truncate", "band")] = "auto"
    """Which tokens share a w; those of a turn or sequence share the geometric mean of their own. auto: those
    that share an importance ratio."""
    low: Annotated[Share | None, needs("correction.mode", "band")] = None
    """Lower limit of the band; None: 0.5."""
    high: Annotated[Annotated[Float, Ge(1)] | None, needs("correction.mode", "truncate", "band")] = None
    """Upper limit of w; None: 2 for truncate, 5 for band."""
    sequence_mask: PositiveFloat | None = None
    """Give weight 0 to a trajectory whose mean log w exceeds this many nats, up or down; None: off."""

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected, which needs the trainer's own log-probabilities before the update."""
        return self.mode != "none" or self.sequence_mask is not None


@dataclass(frozen=True, config=SECTION_RULES)
class OverlongConfig:
    """What becomes of trajectories that come close to a limit, or end at one (both from DAPO)."""

    buffer: PositiveInt | None = None
    """Soft punishment: the reward falls linearly over the last N tokens before
    limits.max_trajectory_tokens; None: off."""
    penalty: Annotated[PositiveFloat, needs("overlong.buffer")] = 1.0
    """What the reward has lost at the limit."""
    exclude: Annotated[str, AfterValidator(_check_stops)] | None = None
    """Leave trajectories out of the loss that ended with these stop reasons, with commas between them:
    max_tokens, max_turns, max_seconds, invalid."""

    @property
    def excluded_stops(self) -> frozenset[str]:
        """The stop reasons in ``exclude``."""
        return _names(self.exclude or "")


@dataclass(frozen=True, config=SECTION_RULES)
class HardwareConfig:
    """The device that computes, and how."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        LocalOnly(("auto", "bfloat16"), ": OpenRLHF trains in bfloat16, leave it at auto"),
    ] = "auto"
    """Precision of forward passes; weights stay in float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Annotated[str, AfterValidator(check_device)] = "auto"
    """auto (the first GPU if there is one), cpu, cuda, cuda:1."""
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
    """Sample the next batch during training; needs GPUs for vLLM alone and rollout.max_staleness of at least 1."""
    partial_rollout: Bool = False
    """With async_rollout: continue unfinished turns after a weight update."""
    deadline_s: PositiveFloat = 3600.0
    """Stop with an error after this many seconds without a step, a checkpoint or progress at start-up."""
    flags: UserKeys = field(default_factory=dict)
    """More flags for OpenRLHF, as {ds.overlap_comm: true}; docs/scaling_out.md lists the allowed ones."""


@dataclass(frozen=True, config=SECTION_RULES)
class EvalConfig:
    """Evaluation before, during and after training."""

    every: Annotated[NonNegativeInt, RESUMABLE, PLACE] = 10
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

    ``mean_update_distance`` is the early warning and the limit to set; the other signals are means over three training
    steps, for sudden changes.
    """

    action: Literal["off", "warn", "stop"] = "warn"
    """warn: print a message and write events.jsonl; stop: also save, end the run and say what to do next."""
    mean_update_distance: PositiveFloat = 0.07
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
    wandb: Annotated[str | None, RESUMABLE, PLACE] = None
    """Weights & Biases project; needs the wandb package."""
    trackio: Annotated[str | None, RESUMABLE, PLACE] = None
    """Project of trackio, which stays on this machine; needs the trackio package."""
