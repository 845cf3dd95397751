"""The policy loss of all algorithms: tensors in, scalar and statistics out. Pure torch.

Shapes: B trajectories, T scored positions (index t scores ``token_ids[t + 1]``), N loss tokens. A worked layout,
before the shift::

    token_ids = [P  P  P  A0 A0 A0 O  O  A1 A1]
    loss_mask = [0  0  0  1  1  1  0  0  1  1 ]
    turn_ids  = [-1 -1 -1 0  0  0  -1 -1 1  1 ]

What lies off the loss mask is never read, so it may be anything, NaN included.

Deviations from the paper: |y| and the turn's length count loss tokens (the policy's own, less those masked out of the
loss). A token with A_t = 0 counts as not clipped. The log-ratio of a segment is clamped to +-20: beyond it the loss has
no gradient, while the clipping bias keeps w = exp(+-20). Ratios are computed in float32, or in float64 for float64
``log_probs``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import Aggregation, RatioLevel, check_choice
from sorl_train.losses.clip_bias import LossStats, loss_stats
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.losses.surrogates import ClipRange, Surrogate, clipped
from sorl_train.losses.terms import check_shapes, row_weights


@dataclass(frozen=True)
class LossSettings:
    """Which policy loss it is.

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
        log_probs: (B, T), the only input that a gradient flows to; it has no second derivative.
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
