"""The algorithms as one table, and the named choices that losses and settings offer. Nothing here imports torch.

An algorithm is one row. Whoever needs to know about algorithms reads the row: the settings' choices and checks, the
critic, the report and the table in docs/algorithms.md. That page also shows how a file or a package of your own adds
an algorithm without a change here (``sorl_train.config.find_algorithm``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

RatioLevel = Literal["token", "turn", "sequence"]
AdvantageKind = Literal["gae", "group", "turn_group", "state_group"]
GAELevel = Literal["token", "turn"]
GroupLevel = Literal["trajectory", "turn"]
GroupBaseline = Literal["mean", "leave_one_out"]
AnchorState = Literal["observation", "history"]
Aggregation = Literal["trajectory_mean", "token_mean"]
KLKind = Literal["k1", "k2", "k3", "k3_unbiased"]
ClipBiasNorm = Literal["scalar", "token", "rms", "logit"]
Target = Literal["gradient", "update"]
CorrectionMode = Literal["none", "truncate", "band"]
SurrogateName = Literal["clipped", "cispo", "sapo", "topr"]


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError with the choices and the nearest one unless ``value`` is one of them."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(choices)}.{hint}")


@dataclass(frozen=True)
class Algorithm:
    """What tells one algorithm from another.

    Raises ValueError for an unknown ratio level, kind of advantage or surrogate, or a value of another type.
    """

    ratio: RatioLevel  # the tokens that share an importance ratio: one token, a turn or the whole sequence
    # ``gae`` estimates advantages with a learned critic. The others compare the rollouts of one prompt with each other,
    # so they need ``rollout.group_size`` of at least 2: ``group`` by their total rewards, ``turn_group`` also by the
    # reward of each turn, and ``state_group`` also by what followed from a state that several of their turns started in
    advantage: AdvantageKind
    normalize: bool = False  # scale steps down when the clipping bias is large (eq:ST_PPO_mc, eq:GRPO_MC)
    about: str = ""  # one line for --help and docs/algorithms.md
    equation: str = ""  # label of the objective in the paper, or where else it comes from
    # the objective of each token: a name of ``sorl_train.losses.policy.SURROGATES``, or a function of importance ratios
    # (N,), advantages (N,) and a ``ClipRange`` that returns (N,) values to maximize
    surrogate: Callable[..., Any] | SurrogateName = "clipped"
    # settings by dotted name that come with the algorithm, such as the clip range that its paper publishes. A config
    # file and the command line win over them
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # settings that its paper publishes and that are not applied, for the documentation
    published: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: str = ""  # where the objective was published, as arXiv:2506.13585
    when: str = ""  # when to use it, for docs/algorithms.md
    # Hooks of a row from outside. Two functions of log_probs, old_log_probs, advantages and the bool loss_mask, (B, T)
    # each: what each token's objective is multiplied by, constants >= 0 (B, T), of a micro-batch; and what the learning
    # rate of an optimizer step is multiplied by, of this rank's share of the mini-batch, the same number on all ranks
    weight: Callable[..., Any] | None = None
    step_scale: Callable[..., float] | None = None
    trust: Callable[..., Any] | None = None  # makes what takes the place of ``TrustRegion``

    def __post_init__(self) -> None:
        check_choice("ratio level", self.ratio, get_args(RatioLevel))
        check_choice("kind of advantage", self.advantage, get_args(AdvantageKind))
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize is True or False, not {self.normalize!r}")
        if isinstance(self.surrogate, str):
            check_choice("surrogate", self.surrogate, get_args(SurrogateName))
        elif not callable(self.surrogate):
            raise ValueError(f"the surrogate is a function or its name, not {self.surrogate!r}")
        for name, hook in self.hooks.items():
            if not callable(hook):
                raise ValueError(f"{name} is a function or None, not {hook!r}")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage == "gae"

    @property
    def surrogate_name(self) -> SurrogateName | None:
        """The name of its surrogate; None for a function from outside."""
        return None if callable(self.surrogate) else self.surrogate

    @property
    def hooks(self) -> dict[str, Any]:
        """Its hooks by name, those that are given: they belong to the update, which the loss alone does not make."""
        names = ("weight", "step_scale", "trust")
        return {name: hook for name in names if (hook := getattr(self, name)) is not None}

    @property
    def needs_groups(self) -> bool:
        """Whether it compares the rollouts of one prompt with each other."""
        return not self.needs_critic


# What the paper of SO-PPO and SO-GRPO uses for all algorithms that it compares. It is the default of the setting.
_PAPER: Mapping[str, Any] = MappingProxyType({"loss.clip_eps": 0.2})

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ppo": Algorithm(
            "token",
            "gae",
            about="PPO",
            equation="eq:ppo_obj",
            published=_PAPER,
            source="arXiv:1707.06347",
            when="the baseline with a critic",
        ),
        "turn_ppo": Algorithm(
            "turn",
            "gae",
            about="PPO with one ratio a turn",
            equation="eq:turn_level_PPO",
            published=_PAPER,
            source="arXiv:2511.20718",
            when="to see what the turn ratio does without normalization",
        ),
        "s_ppo": Algorithm(
            "token",
            "gae",
            True,
            "PPO, normalized",
            "the paper's ablation",
            published=_PAPER,
            source="arXiv:2511.20718",
            when="to see what normalization does without the turn ratio",
        ),
        "so_ppo": Algorithm(
            "turn",
            "gae",
            True,
            "SO-PPO: turn-level PPO, normalized",
            "eq:ST_PPO_mc",
            published=_PAPER,
            source="arXiv:2511.20718",
            when="many optimizer steps on each batch, with a critic",
        ),
        "grpo": Algorithm(
            "token",
            "group",
            about="GRPO",
            equation="eq:GRPO_objective",
            published=_PAPER,
            source="arXiv:2402.03300",
            when="the baseline without a critic",
        ),
        "gspo": Algorithm(
            "sequence",
            "group",
            about="GSPO, one ratio a sequence",
            equation="the paper's baseline",
            # not applied: the paper of SO-GRPO compares with GSPO at 0.2, and so do the recorded studies
            published={"loss.clip_eps": 3e-4, "loss.clip_eps_high": 4e-4},
            source="arXiv:2507.18071",
            when="token ratios are noisy, as in mixtures of experts",
        ),
        "so_grpo": Algorithm(
            "token",
            "group",
            True,
            "SO-GRPO: GRPO, normalized",
            "eq:GRPO_MC",
            published=_PAPER,
            source="arXiv:2511.20718",
            when="many optimizer steps on each batch, without a critic",
        ),
        "cispo": Algorithm(
            "token",
            "group",
            about="CISPO: bounded weights, no token is cut",
            surrogate="cispo",
            defaults={"loss.clip_eps_high": 4.0, "loss.aggregation": "token_mean"},
            source="arXiv:2506.13585, the bound arXiv:2510.13786",
            when="rare but decisive tokens lose their gradient in PPO's clip",
        ),
        "sapo": Algorithm(
            "token",
            "group",
            about="SAPO: a soft gate in place of the clip",
            surrogate="sapo",
            defaults={"loss.sapo_tau_pos": 1.0, "loss.sapo_tau_neg": 1.05},
            source="arXiv:2511.20347",
            when="ratios vary much, and a hard cut would drop many tokens",
        ),
        "topr": Algorithm(
            "sequence",
            "group",
            about="TOPR: off-policy REINFORCE, tapered where the advantage is negative",
            surrogate="topr",
            source="arXiv:2503.14286",
            when="trajectories are old or from elsewhere, and good ones are to be imitated",
        ),
        "rloo": Algorithm(
            "token",
            "group",
            about="RLOO: the baseline is the mean of the other rollouts",
            defaults={"loss.group_baseline": "leave_one_out", "loss.group_std": False},
            source="arXiv:2402.14740",
            when="GRPO without its division, which weighs easy and hard questions up",
        ),
        "mt_grpo": Algorithm(
            "token",
            "turn_group",
            about="MT-GRPO: also compares the rewards of turns",
            defaults={"loss.turn_weight": 1.0},
            source="arXiv:2505.11821",
            when="the task pays good turns, right answers are rare, and rollouts have equally many turns: it compares "
            "turns by number and cannot teach when to stop",
        ),
        "gigpo": Algorithm(
            "token",
            "state_group",
            about="GiGPO: also compares turns from the same state",
            defaults={"loss.turn_weight": 1.0, "loss.gamma": 0.95},
            source="arXiv:2505.10978",
            when="the same state is met again, in one rollout or in several",
        ),
    }
)
