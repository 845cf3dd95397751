"""The algorithms as one table."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast, get_args

Aggregation = Literal["trajectory_mean", "token_mean"]


KLKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Algorithm:
    """The three switches that tell the algorithms apart."""

    ratio: RatioLevel
    normalize: bool
    advantage: Literal["gae", "group"]


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ppo": Algorithm("token", False, "gae"),  # eq:ppo_obj
        "turn_ppo": Algorithm("turn", False, "gae"),  # eq:turn_level_PPO
        "s_ppo": Algorithm("token", True, "gae"),  # the ablation
        "so_ppo": Algorithm("turn", True, "gae"),  # eq:ST_PPO_mc
        "grpo": Algorithm("token", False, "group"),  # eq:GRPO_objective
        "gspo": Algorithm("sequence", False, "group"),  # the paper's baseline
        "so_grpo": Algorithm("token", True, "group"),  # eq:GRPO_MC
    }
)


def get_algorithm(name: str, ratio: str = "auto") -> Algorithm:
    """The algorithm ``name``, at another ratio level unless ``ratio`` is ``auto``.

    Raises ValueError with the nearest name for an unknown one.
    """
    check_choice("algorithm", name, tuple(ALGORITHMS))
    check_choice("ratio level", ratio, ("auto", *get_args(RatioLevel)))
    algorithm = ALGORITHMS[name]
    return algorithm if ratio == "auto" else dataclasses.replace(algorithm, ratio=cast(RatioLevel, ratio))


ClipBiasNorm = Literal["scalar", "trajectory", "token", "token_mean", "rms", "logit", "gradient"]


Scope = Literal["mini_batch", "trajectory"]


Target = Literal["gradient", "update"]


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError naming ``value``, the choices and the nearest one."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(choices)}.{hint}")


RatioLevel = Literal["token", "turn", "sequence"]
