"""The policy loss of all algorithms: tensors in, scalar and statistics out. Pure torch.

A surrogate is the objective of one token: it takes the importance ratios (N,) of the loss tokens, which carry the
gradient, their advantages (N,) and a ``ClipRange``, and returns N values to maximize. ``SURROGATES`` names those of the
table of algorithms; one of your own is a function of the same form (docs/algorithms.md). ``ratio.log()`` is the mean of
log p - log p_old over the token's segment. So where advantages differ inside a segment, each of its tokens gets the
mean of a constant weight * A over the segment, which is the credit of the lemma eq:turn_level_credit_assignment. The
value differs from A log p by a constant, A log p_old.

Shapes: B trajectories, T scored positions (index t scores ``token_ids[t + 1]``), N loss tokens. A worked layout,
before the shift::

    token_ids = [P  P  P  A0 A0 A0 O  O  A1 A1]
    loss_mask = [0  0  0  1  1  1  0  0  1  1 ]
    turn_ids  = [-1 -1 -1 0  0  0  -1 -1 1  1 ]

Values outside the loss mask are never read and may be anything, NaN included.

Deviations from the paper: |y| and the turn's length count loss tokens (the policy's own, less those masked out of the
loss). A token with A_t = 0 counts as not clipped. The log-ratio of a segment is clamped to +-20: beyond it the loss has
no gradient, while the clipping bias keeps w = exp(+-20). Ratios are computed in float32, or in float64 for float64
``log_probs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import Aggregation, RatioLevel, SurrogateName, check_choice
from sorl_train.losses.clip_bias import LossStats, loss_stats
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.losses.terms import check_shapes, row_weights


@dataclass(frozen=True)
class ClipRange:
    """The range that ratios are clipped to, and the temperatures of ``sapo``, which has a soft gate instead.

    Raises ValueError if ``dual`` is not above 1, or a temperature not above 0.
    """

    eps: float = 0.2  # the range is [1 - eps, 1 + eps]; the paper's value is 0.2, GSPO's own about 3e-4
    eps_high: float | None = None  # replaces eps in the upper bound
    # c > 1 of Dual-Clip PPO (arXiv:1912.09729), which also bounds from above the ratio of a negative advantage
    dual: float | None = None
    tau_pos: float = 1.0  # temperature of the gate of ``sapo`` for positive advantages
    tau_neg: float = 1.05  # and for others

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
        """The clip rule, of any shape: bool, True for tokens that PPO's clip leaves without a gradient (B^c).

        A token with advantage 0 has no gradient to lose and does not count. Dual clip does not count either: B^c
        holds what PPO's own clip cuts.
        """
        return ((advantage > 0) & (ratio > self.high)) | ((advantage < 0) & (ratio < self.low))


Surrogate = Callable[[Tensor, Tensor, ClipRange], Tensor]


def clipped(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """min(w A, clip(w) A), the surrogate of eq:ppo_obj, eq:turn_level_PPO and eq:GRPO_objective; all (N,)."""
    bounded = torch.where(clip.clips(ratio, advantage), ratio.clamp(clip.low, clip.high), ratio)
    if clip.dual is not None:
        bounded = torch.where(advantage < 0, bounded.clamp(max=clip.dual), bounded)
    return bounded * advantage


def cispo(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """sg(min(w, high)) A log w: REINFORCE with a bounded importance weight, which is a constant (arXiv:2506.13585).

    All tensors are (N,). No token loses its gradient. There is no lower bound, as published: it "did not impose" one.
    """
    return ratio.detach().clamp(max=clip.high) * advantage * ratio.log()


def sapo(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """(4 / tau) sigmoid(tau (w - 1)) A: a soft gate in place of the clip (arXiv:2511.20347).

    All tensors are (N,). Its derivative by w is A at w = 1, and fades on both sides, the sooner the higher tau is.
    """
    tau = torch.full_like(advantage, clip.tau_neg).masked_fill(advantage > 0, clip.tau_pos)
    return 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage


def topr(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """sg(1 if A > 0 else min(w, 1)) A log w: tapered off-policy REINFORCE (arXiv:2503.14286).

    All tensors are (N,). Tokens with a positive advantage are imitated without an importance weight. The weight of the
    others is truncated to [0, 1]: it fades as they become unlikely, and never grows.

    Deviations from the paper: its weight belongs to a whole sequence and is the product of the tokens' ratios. Here w
    is the geometric mean over the segment, as at every ratio level. Both reach 1 for the same sequences; below 1 the
    mean fades more slowly. The sign is that of the advantage, which the paper's reward with its baseline stands for.
    """
    weight = ratio.detach().clamp(max=1.0).masked_fill(advantage > 0, 1.0)
    return weight * advantage * ratio.log()


SURROGATES: Mapping[SurrogateName, Surrogate] = MappingProxyType(
    {"clipped": clipped, "cispo": cispo, "sapo": sapo, "topr": topr}
)


@dataclass(frozen=True)
class LossSettings:
    """The choice of policy loss.

    Attributes:
        ratio_level: the tokens that share an importance ratio.
        surrogate: objective of each token; the default is PPO's clipped one.
        clip: the clip range of the surrogate. It also says which tokens count as clipped, whatever the surrogate.
        aggregation: see ``aggregate``.

    Raises ValueError for an unknown ratio level.
    """

    ratio_level: RatioLevel = "token"
    surrogate: Surrogate = clipped
    clip: ClipRange = field(default_factory=ClipRange)
    aggregation: Aggregation = "trajectory_mean"

    def __post_init__(self) -> None:
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))


@dataclass(frozen=True)
class LossOutput:
    """What ``policy_loss`` returns: a scalar to call ``backward`` on, and the sums behind its metrics and its bias."""

    loss: Tensor
    stats: LossStats


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    settings: LossSettings | None = None,
    *,
    denominator: float | None = None,
    logit_scale: Tensor | None = None,
    correction: Tensor | None = None,
) -> LossOutput:
    """The policy loss of every algorithm, and the statistics of its clipping bias::

        w_t  = exp(mean of log p - log p_old over the segment of t)            eq:turn_level_IS
        loss = -mean over trajectories of (1/|y|) sum_t f_t surrogate(w_t, A_t)
        c_t  = 1[t is clipped] f_t w_t A_t, the clipping bias                  eq:Cturn_def, eq:ppo_composition

    A segment is a token (eq:ppo_obj, eq:GRPO_objective), a turn (eq:turn_level_PPO) or the whole sequence (GSPO).
    Advantages, and with them clipping, stay per token. The module's docstring lists the deviations from the paper.

    Args:
        log_probs: (B, T), the only input that a gradient flows to. Differentiable once; no second derivatives.
        old_log_probs, advantages: (B, T).
        loss_mask: (B, T) bool. A trajectory without loss tokens contributes 0.
        turn_ids: (B, T) int, >= 0 on loss tokens, not decreasing along a trajectory; read at level ``turn`` only.
        settings: which loss; None is PPO's.
        denominator: that of the whole mini-batch (``loss_denominator``), over all its micro-batches and ranks, whose
            gradients are to be summed, not averaged. None: that of this batch.
        logit_scale: (B, T) as ``token_log_probs`` gives it, for the ``logit`` norm.
        correction: (B, T), f_t >= 0, a constant (``losses.correction``); None, as in the paper: 1 everywhere.

    Raises ValueError for shapes that differ, or turn ids that break their contract.
    """
    settings = settings or LossSettings()
    check_shapes(log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_shapes(log_probs, loss_mask=loss_mask, turn_ids=turn_ids)
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    segments = Segments.of(settings.ratio_level, loss_mask, turn_ids)
    advantage = segments.pick(advantages.detach()).to(dtype)  # (N,), as all that follows
    factor = None if correction is None else segments.pick(correction.detach()).to(dtype)
    weighted = advantage if factor is None else factor * advantage
    log_ratio = segments.pick(log_probs).to(dtype) - segments.pick(old_log_probs.detach()).to(dtype)
    ratio = importance_ratio(segments.spread_mean(log_ratio))  # each token has that of its segment
    with torch.no_grad():
        bias = (ratio * weighted).masked_fill_(~settings.clip.clips(ratio, weighted), 0.0)  # c_t
        stats = loss_stats(segments, log_ratio, ratio, weighted, bias, logit_scale)
        weights = row_weights(segments.row_lengths, settings.aggregation, denominator, dtype)
    surrogate = settings.surrogate(ratio, advantage, settings.clip)
    check_shapes(ratio, surrogate=surrogate)
    loss = -(segments.row_sums(surrogate if factor is None else factor * surrogate) * weights).sum()
    return LossOutput(loss, stats)
