"""Sections of ``TrainConfig`` about what a training step collects, and how much each part of it counts."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from sorl_env.errors import did_you_mean
from sorl_train.algorithms import CorrectionMode, RatioLevel
from sorl_train.config.field import (
    RESUMABLE,
    SECTION_RULES,
    Float,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    needs,
)

FILTERED_STOPS = ("max_tokens", "max_turns", "max_seconds", "invalid")  # what ``overlong.exclude`` may name


def _names(text: str) -> frozenset[str]:
    """The names in a text with commas between them."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _check_stops(text: str) -> str:
    for name in sorted(_names(text) - set(FILTERED_STOPS)):
        raise ValueError(
            f"{name!r} is no stop reason to leave out (those that end with 'error' or 'aborted' are in no loss "
            f"anyway). {did_you_mean(name, FILTERED_STOPS)}"
        )
    return text


@dataclass(frozen=True, config=SECTION_RULES)
class RolloutConfig:
    """What one training step collects."""

    batch_size: PositiveInt = 512
    """Trajectories in one training step. Paper: 512."""
    group_size: PositiveInt = 1
    """Rollouts of each prompt; group advantages need 2 or more. It divides batch_size."""
    dynamic_sampling: Annotated[NonNegativeInt, Le(1000)] = 0
    """Replace groups whose rewards are all equal with groups of other prompts, in at most this many further
    rounds (DAPO); 0: off."""
    max_staleness: NonNegativeInt = 0
    """Train on trajectories that were sampled this many training steps ago; 0: on the newest."""
    save_every: Annotated[PositiveInt, RESUMABLE] = 10
    """Write the trajectories of every n-th training step, and of the first and the last."""


@dataclass(frozen=True, config=SECTION_RULES)
class ReplayConfig:
    """A buffer of past trajectories, which join the new rollouts of the same question."""

    size: NonNegativeInt = 0
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
    """Soft punishment: the reward falls linearly over the last so many tokens before
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
