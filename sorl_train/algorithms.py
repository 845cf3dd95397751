"""The algorithms as one table, and the named choices that losses and settings offer. Nothing here imports torch.

An algorithm is one row. Whoever needs to know about algorithms reads the row: the settings' choices and checks, the
critic, the report and the table in docs/algorithms.md. That page also shows how a file or a package of your own adds
an algorithm without a change here (``sorl_train.config.find_algorithm``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

RatioLevel = Literal["token", "turn", "sequence"]
AdvantageKind = Literal["gae", "group"]
Aggregation = Literal["trajectory_mean", "token_mean"]
KLKind = Literal["k1", "k2", "k3"]
ClipBiasNorm = Literal["scalar", "trajectory", "token", "token_mean", "rms", "logit", "gradient"]
Scope = Literal["mini_batch", "trajectory"]
Target = Literal["gradient", "update"]
CorrectionMode = Literal["none", "truncate", "band"]


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError with the choices and the nearest one unless ``value`` is one of them."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(choices)}.{hint}")


@dataclass(frozen=True)
class Algorithm:
    """What tells one algorithm from another.

    Attributes:
        ratio: the tokens that share an importance ratio: each token has its own, or a turn or the whole sequence has
            one.
        advantage: ``gae`` estimates advantages with a learned critic. ``group`` compares the rollouts of one prompt
            with each other, so it needs ``rollout.group_size`` of at least 2.
        normalize: scale steps down when the clipping bias is large (eq:ST_PPO_mc, eq:GRPO_MC).
        about: one line for ``--help`` and docs/algorithms.md.
        equation: label of the objective in the paper, or where else it comes from.
        surrogate: the objective of each token, a function of importance ratios (N,), advantages (N,) and a
            ``ClipRange`` that returns (N,) values to maximize (``sorl_train.losses.surrogates``). None stands for
            PPO's clipped surrogate.

    Raises:
        ValueError: for an unknown ratio level or kind of advantage, or a value of another type.
    """

    ratio: RatioLevel
    advantage: AdvantageKind
    normalize: bool = False
    about: str = ""
    equation: str = ""
    surrogate: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_choice("ratio level", self.ratio, get_args(RatioLevel))
        check_choice("kind of advantage", self.advantage, get_args(AdvantageKind))
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize is True or False, not {self.normalize!r}")
        if self.surrogate is not None and not callable(self.surrogate):
            raise ValueError(f"the surrogate is a function, not {self.surrogate!r}")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage == "gae"


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ppo": Algorithm("token", "gae", about="PPO", equation="eq:ppo_obj"),
        "turn_ppo": Algorithm("turn", "gae", about="PPO with one ratio a turn", equation="eq:turn_level_PPO"),
        "s_ppo": Algorithm("token", "gae", True, "PPO, normalized", "the paper's ablation"),
        "so_ppo": Algorithm("turn", "gae", True, "SO-PPO: turn-level PPO, normalized", "eq:ST_PPO_mc"),
        "grpo": Algorithm("token", "group", about="GRPO", equation="eq:GRPO_objective"),
        "gspo": Algorithm(
            "sequence", "group", about="GSPO, one ratio a sequence", equation="the paper's baseline"
        ),
        "so_grpo": Algorithm("token", "group", True, "SO-GRPO: GRPO, normalized", "eq:GRPO_MC"),
    }
)
