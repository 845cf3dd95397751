"""Policy, value and KL losses: tensors in, scalar and statistics out. Pure torch.

Shapes: B trajectories, T scored positions (index t scores ``token_ids[t + 1]``). A worked layout, before the shift::

    token_ids = [P  P  P  A0 A0 A0 O  O  A1 A1]
    loss_mask = [0  0  0  1  1  1  0  0  1  1 ]
    turn_ids  = [-1 -1 -1 0  0  0  -1 -1 1  1 ]

One function, ``policy_loss``, and three switches (``ALGORITHMS``): the level of the importance ratio, the
clipping-triggered normalization, the advantage. What is off the loss mask is never read, so it may be anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sorl_train.algorithms import Aggregation, ClipBiasNorm, RatioLevel, check_choice
from sorl_train.losses.aggregate import _check_shapes, _row_weights
from sorl_train.losses.clip_bias import ClipBias, measure
from sorl_train.losses.ratios import MAX_LOG_RATIO
from sorl_train.losses.segments import Segments
from sorl_train.losses.sums import Sums


@dataclass(frozen=True)
class LossStats(Sums):
    """Sums over the loss tokens, behind the metrics. ``log_ratio`` is the token's own at every ratio level."""

    tokens: Tensor
    signal: Tensor
    clipped: Tensor
    ratio_sum: Tensor
    ratio_square_sum: Tensor
    log_ratio_square_sum: Tensor

    def metrics(self) -> dict[str, float]:
        """Metrics by name.

        ``signal_frac``: share of tokens with an advantage. ``clip_frac``: share of clipped tokens. ``approx_kl``:
        mean(log_ratio^2) / 2, an estimate of KL(old || current) that is never negative and needs no exponential.
        ``ratio_mean``, ``ratio_std``: of the ratio in the loss.
        """
        tokens = max(float(self.tokens), 1.0)
        mean = float(self.ratio_sum) / tokens
        return {
            "signal_frac": float(self.signal) / tokens,
            "clip_frac": float(self.clipped) / tokens,
            "approx_kl": 0.5 * float(self.log_ratio_square_sum) / tokens,
            "ratio_mean": mean,
            "ratio_std": max(float(self.ratio_square_sum) / tokens - mean**2, 0.0) ** 0.5,
        }


@dataclass(frozen=True)
class LossOutput:
    """What ``policy_loss`` returns.

    Attributes:
        loss: scalar, to call backward on once.
        clip_bias: statistics of the clipping bias, detached, to be summed over micro-batches and ranks.
        stats: sums behind the metrics, likewise.
        clip_bias_objective: scalar whose parameter gradient is that of the clipping bias C; None unless asked for,
            and None when this micro-batch clipped nothing.
    """

    loss: Tensor
    clip_bias: ClipBias
    stats: LossStats
    clip_bias_objective: Tensor | None


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to ``inputs`` is known in closed form."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output * gradient, None, None


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    *,
    ratio_level: RatioLevel,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    aggregation: Aggregation = "trajectory_mean",
    denominator: float | None = None,
    logit_scale: Tensor | None = None,
    trajectory_norm: ClipBiasNorm | None = None,
    delta: float = 1.0,
    clip_bias_objective: bool = False,
) -> LossOutput:
    """The clipped surrogate loss of all seven algorithms, and the statistics of its clipping bias.

    The tokens of a *segment* share an importance ratio w, the geometric mean over its loss tokens
    (eq:turn_level_IS): a segment is a token (eq:ppo_obj, eq:GRPO_objective), a turn (eq:turn_level_PPO) or the
    whole sequence (GSPO). Clipping stays per token: token t of segment s is clipped, a member of B^c, when A_t > 0
    and w_s > 1 + eps_high, or A_t < 0 and w_s < 1 - eps. With ``A_s = sum_t A_t`` and ``cut_s`` the part of it on
    clipped tokens::

        surrogate_s    = w_s (A_s - cut_s) + clip(w_s) cut_s                    eqn:ppo_objective_no_clip
        d J / d logp_t = (1/|y|) w_s (A_s - cut_s) / |s|,  t in s               eq:turn_level_credit_assignment
        c_s            = w_s cut_s, the clipping bias                           eq:Cturn_def, eq:ppo_composition

    Deviations from the paper: |y| and the turn's length count loss tokens (the policy's own, less those masked out
    of the loss). A token with A_t = 0 counts as not clipped; it has nothing to clip. The segment's log-ratio is
    clamped to +-20; beyond it the loss has the gradient of the clamp, 0, while the clipping bias keeps
    w = exp(+-20). Ratios are computed in float32, or float64 for float64 ``log_probs``.

    Args:
        log_probs: (B, T), the only input a gradient flows to; it can be taken once, not twice.
        old_log_probs, advantages: (B, T).
        loss_mask: (B, T) bool. A trajectory without loss tokens contributes 0.
        turn_ids: (B, T) int, >= 0 on loss tokens, not decreasing along a trajectory; read at level ``turn`` only.
        clip_eps: clip range; the paper's value is 0.2. GSPO's own is about 3e-4.
        clip_eps_high: upper clip range where it differs.
        dual_clip: c > 1 of Dual-Clip PPO (arXiv:1912.09729): a token with A_t < 0 and w_s > c has the surrogate
            c A_t, and no gradient. It is not counted as clipped, and is no part of the clipping bias: in the paper
            B^c holds what PPO's own clip cuts. None: off.
        aggregation, denominator: see ``aggregate``. The denominator is of the whole mini-batch, over all its
            micro-batches and ranks, whose gradients are to be summed, not averaged.
        logit_scale: (B, T) as ``token_log_probs`` gives it, for the ``logit`` norm.
        trajectory_norm: clip-bias norm for the trajectory scope: each trajectory's terms are multiplied by its own
            f_i = delta / max(||C_i||, delta), a constant to the gradient. None: f_i = 1.
        delta: lower bound of that norm; the paper's value is 1.
        clip_bias_objective: also build the scalar behind the ``gradient`` norm.

    Raises:
        ValueError: for shapes that differ, an unknown choice, or turn ids that break their contract.
    """
    check_choice("ratio_level", ratio_level, get_args(RatioLevel))
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    _check_shapes(
        log_probs, old_log_probs=old_log_probs, advantages=advantages, loss_mask=loss_mask, turn_ids=turn_ids
    )
    with torch.no_grad():
        dtype = torch.promote_types(log_probs.dtype, torch.float32)
        segments = Segments.of(ratio_level, loss_mask, turn_ids)
        sizes = segments.sizes.to(dtype)
        log_ratio = segments.pick(log_probs, dtype).sub_(segments.pick(old_log_probs, dtype))
        kl_sum = torch.dot(log_ratio, log_ratio)
        log_ratio = segments.total(log_ratio) / sizes
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        bounded = ratio.clamp(1.0 - clip_eps, 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high))
        side = torch.sign(ratio - bounded)  # the sign of the advantages that this segment clips; 0: none
        advantage = segments.pick(advantages, dtype)
        cut = (segments.spread(side) * advantage).relu_()  # |A_t| on clipped tokens, 0 elsewhere
        cut_advantage = segments.total(cut) * side
        kept = ratio * (segments.total(advantage) - cut_advantage)
        surrogate = torch.addcmul(kept, bounded, cut_advantage)
        if dual_clip is not None:
            held = segments.total(advantage.clamp(max=0.0)) * (ratio > dual_clip)
            kept = kept - ratio * held
            surrogate = surrogate + (dual_clip - ratio) * held
        surrogate = segments.rows(surrogate)
        bias = ratio * cut_advantage
        factors, clip_bias = measure(
            segments, ratio, bias, cut, logit_scale=logit_scale, trajectory_norm=trajectory_norm, delta=delta
        )
        weights = factors * _row_weights(segments.row_lengths, aggregation, denominator, dtype)  # (B,)
        stats = LossStats(
            tokens=segments.row_lengths.sum().to(dtype),
            signal=(advantage != 0).sum().to(dtype),
            clipped=clip_bias.clipped,
            ratio_sum=(ratio * segments.counts).sum(),
            ratio_square_sum=(ratio.square() * segments.counts).sum(),
            log_ratio_square_sum=kl_sum,
        )
        credit = kept * (log_ratio.abs() < MAX_LOG_RATIO) / sizes
        gradient = segments.place(segments.spread(credit)).mul_(-weights[:, None])
    loss = _WithGradient.apply(log_probs, -(surrogate * weights).sum(), gradient.to(log_probs.dtype))
    objective = None
    if clip_bias_objective and bool(clip_bias.clipped):
        bias_gradient = segments.place(segments.spread(bias / sizes)).mul_(weights[:, None])
        value = (segments.rows(bias) * weights).sum()
        objective = _WithGradient.apply(log_probs, value, bias_gradient.to(log_probs.dtype))
    return LossOutput(loss, clip_bias, stats, objective)
