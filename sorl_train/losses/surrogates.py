"""The objective of one token: what an importance ratio and an advantage are worth. Pure torch.

A surrogate takes the importance ratios (N,) of the loss tokens, which carry the gradient, their advantages (N,) and a
``ClipRange``, and returns N values to maximize. All algorithms of the table use ``clipped``; one of your own is a
function of the same form (docs/algorithms.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClipRange:
    """The range that ratios are clipped to.

    Attributes:
        eps: the range is [1 - eps, 1 + eps]; the paper's value is 0.2, GSPO's own about 3e-4.
        eps_high: replaces eps in the upper bound if it is given.
        dual: c > 1 of Dual-Clip PPO (arXiv:1912.09729), which bounds the ratio of tokens with a negative advantage
            from above as well. None turns it off.

    Raises:
        ValueError: ``dual`` is not above 1.
    """

    eps: float = 0.2
    eps_high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(f"dual_clip must be above 1, not {self.dual}")

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
