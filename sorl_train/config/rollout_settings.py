"""Sections of ``TrainConfig`` about what a training step collects, and how much each part of it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sorl_train.algorithms import CorrectionMode, RatioLevel
from sorl_train.config.field import opt


@dataclass(frozen=True)
class RolloutConfig:
    """What one training step collects."""

    batch_size: int = opt(512, "trajectories in one training step", paper="512", low=1)
    group_size: int = opt(
        1,
        "rollouts of each prompt; group advantages need 2 or more. It divides batch_size",
        low=1,
    )
    dynamic_sampling: int = opt(
        0,
        "replace groups whose rewards are all equal with groups of other prompts, in at most this many further rounds "
        "(DAPO); 0: off",
        low=0,
        high=1000,
    )
    max_staleness: int = opt(
        0, "train on trajectories that were sampled this many training steps ago; 0: on the newest", low=0
    )
    save_every: int = opt(
        10, "write the trajectories of every n-th training step, and of the first and the last", low=1
    )


@dataclass(frozen=True)
class ReplayConfig:
    """A buffer of past trajectories, which join the new rollouts of the same question."""

    size: int = opt(0, "trajectories in the buffer, from which the oldest are dropped; 0: no replay", low=0)
    mode: Literal["success", "recent"] = opt(
        "success",
        "success: where all rollouts of a question fail, past successes take the place of some of them (ARPO); recent: "
        "the newest past rollouts of a question join its new ones, whatever their rewards (RePO)",
    )
    per_group: int = opt(1, "most past trajectories in one group", low=1)
    max_age: int = opt(
        100,
        "replay trajectories whose weights are at most this many training steps old; drop older ones",
        low=1,
    )


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights of the policy loss that correct for a sampler whose log-probabilities are not the trainer's."""

    mode: CorrectionMode = opt(
        "none",
        "what becomes of w = trainer's probability / sampler's: truncate (TIS) takes min(w, high), band (IcePop) takes "
        "w inside [low, high] and 0 outside",
    )
    level: Literal["auto", RatioLevel] = opt(
        "auto",
        "which tokens share a w; those of a turn or sequence share the geometric mean of their own. auto: those that "
        "share an importance ratio",
    )
    low: float | None = opt(None, "lower limit of the band; None: 0.5", low=0, high=1)
    high: float | None = opt(None, "upper limit of w; None: 2 for truncate, 5 for band", low=1)
    sequence_mask: float | None = opt(
        None,
        "give weight 0 to a trajectory whose mean log w exceeds this many nats, up or down; None: off",
        above=0,
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is corrected, which needs the trainer's own log-probabilities before the update."""
        return self.mode != "none" or self.sequence_mask is not None


@dataclass(frozen=True)
class OverlongConfig:
    """What becomes of trajectories that come close to a limit, or end at one (both from DAPO)."""

    buffer: int | None = opt(
        None,
        "soft punishment: the reward falls linearly over the last so many tokens before limits.max_trajectory_tokens; "
        "None: off",
        low=1,
    )
    penalty: float = opt(1.0, "what the reward has lost at the limit", above=0)
    exclude: str | None = opt(
        None,
        "leave trajectories out of the loss that ended with these stop reasons, with commas between them: max_tokens, "
        "max_turns, max_seconds, invalid",
    )

    @property
    def excluded_stops(self) -> frozenset[str]:
        """The stop reasons in ``exclude``."""
        return frozenset(name.strip() for name in (self.exclude or "").split(",") if name.strip())
