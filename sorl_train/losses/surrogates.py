"""The objective of one token: what an importance ratio and an advantage are worth. Pure torch.

A surrogate takes the importance ratios (N,) of the loss tokens, which carry the gradient, their advantages (N,) and a
``ClipRange``, and returns N values to maximize. ``SURROGATES`` names those of the table of algorithms; one of your own
is a function of the same form (docs/algorithms.md).

``ratio.log()`` is the mean of log p - log p_old over the token's segment. So where advantages differ inside a segment,
each of its tokens gets the mean of a constant weight * A over the segment, which is the credit of the lemma
eq:turn_level_credit_assignment. The value differs from A log p by a constant, A log p_old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sorl_train.algorithms import SurrogateName


@dataclass(frozen=True)
class ClipRange:
    """The range that ratios are clipped to, and the temperatures of the surrogate that has a gate instead.

    Attributes:
        eps: the range is [1 - eps, 1 + eps]; the paper's value is 0.2, GSPO's own about 3e-4.
        eps_high: replaces eps in the upper bound if it is given.
        dual: c > 1 of Dual-Clip PPO (arXiv:1912.09729), which bounds the ratio of tokens with a negative advantage
            from above as well. None turns it off.
        tau_pos, tau_neg: temperatures of the gate of ``sapo`` for positive and for other advantages.

    Raises ValueError if ``dual`` is not above 1, or a temperature not above 0.
    """

    eps: float = 0.2
    eps_high: float | None = None
    dual: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(f"dual_clip must be above 1, not {self.dual}")
        for name in ("tau_pos", "tau_neg"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}, a temperature of sapo, must be above 0, not {getattr(self, name)}")

    @property
    def low(self) -> float:
        """Lower bound of the ratio."""
        return 1.0 - self.eps

    @property
    def high(self) -> float:
        """Upper bound of the ratio."""
        return 1.0 + (self.eps if self.eps_high is None else self.eps_high)

    def clips(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """The clip rule: bool, True for tokens that PPO's clip leaves without a gradient (the paper's set B^c).

        A token with advantage 0 has no gradient to lose and does not count. Dual clip does not count either: B^c
        holds what PPO's own clip cuts.
        """
        return ((advantage > 0) & (ratio > self.high)) | ((advantage < 0) & (ratio < self.low))


Surrogate = Callable[[Tensor, Tensor, ClipRange], Tensor]


def clipped(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """min(w A, clip(w) A), the surrogate of eq:ppo_obj, eq:turn_level_PPO and eq:GRPO_objective."""
    bounded = torch.where(clip.clips(ratio, advantage), ratio.clamp(clip.low, clip.high), ratio)
    if clip.dual is not None:
        bounded = torch.where(advantage < 0, bounded.clamp(max=clip.dual), bounded)
    return bounded * advantage


def cispo(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """sg(min(w, high)) A log w: REINFORCE with a bounded importance weight, which is a constant (arXiv:2506.13585).

    No token loses its gradient. There is no lower bound, as published: it "did not impose" one.
    """
    return ratio.detach().clamp(max=clip.high) * advantage * ratio.log()


def sapo(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """(4 / tau) sigmoid(tau (w - 1)) A: a soft gate in place of the clip (arXiv:2511.20347).

    Its derivative by w is A at w = 1, and fades on both sides, the sooner the higher tau is.
    """
    tau = torch.full_like(advantage, clip.tau_neg).masked_fill(advantage > 0, clip.tau_pos)
    return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage


def topr(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """sg(1 if A > 0 else min(w, 1)) A log w: tapered off-policy REINFORCE (arXiv:2503.14286).

    Tokens with a positive advantage are imitated without an importance weight. The weight of the others is truncated
    to [0, 1]: it fades as they become unlikely, and never grows.

    Deviations from the paper: its weight belongs to a whole sequence and is the product of the tokens' ratios. Here w
    is the geometric mean over the segment, as at every ratio level. Both reach 1 for the same sequences; below 1 the
    mean fades more slowly. The sign is that of the advantage, which the paper's reward with its baseline stands for.
    """
    weight = ratio.detach().clamp(max=1.0).masked_fill(advantage > 0, 1.0)
    return weight * advantage * ratio.log()


SURROGATES: Mapping[SurrogateName, Surrogate] = MappingProxyType(
    {"clipped": clipped, "cispo": cispo, "sapo": sapo, "topr": topr}
)
