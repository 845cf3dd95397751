"""The policy loss with its gradient in closed form: what ``policy_loss`` was before it became plain autograd.

``benchmarks/losses.py`` measures the two side by side. The closed form works on sums over segments, so it does less for
each token and has no backward pass of its own: the gradient is computed along with the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sorl_train.losses.aggregate import row_weights
from sorl_train.losses.clip_bias import ClipBias
from sorl_train.losses.policy import LossOutput, LossSettings, LossStats
from sorl_train.losses.ratios import MAX_LOG_RATIO
from sorl_train.losses.segments import Segments


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to ``inputs`` is known."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output * gradient, None, None


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


@dataclass(frozen=True)
class _SegmentSums:
    """Segments with the sums that the closed form needs; level sequence has one segment a row."""

    segments: Segments
    per_row: Tensor | None  # (B,) segments of each row; None at level sequence

    @staticmethod
    def of(settings: LossSettings, loss_mask: Tensor, turn_ids: Tensor) -> _SegmentSums:
        segments = Segments.of(settings.ratio_level, loss_mask, turn_ids)
        if settings.ratio_level == "token":
            return _SegmentSums(segments, segments.row_lengths)
        if settings.ratio_level == "sequence":
            return _SegmentSums(segments, None)
        assert segments.lengths is not None
        starts = segments.lengths.cumsum(0) - segments.lengths
        row = torch.searchsorted(segments.row_lengths.cumsum(0), starts, right=True)
        return _SegmentSums(segments, torch.bincount(row, minlength=len(segments.row_lengths)))

    def total(self, values: Tensor) -> Tensor:
        """(N,) -> (S,)."""
        return values if self.segments.lengths is None else _sums(values, self.segments.lengths)

    def rows(self, values: Tensor) -> Tensor:
        """(S,) -> (B,)."""
        return values if self.per_row is None else _sums(values, self.per_row)


def closed_form_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    settings: LossSettings,
    *,
    denominator: float | None = None,
    logit_scale: Tensor | None = None,
) -> LossOutput:
    """``policy_loss`` for the clipped surrogate, without dual clip, trajectory scope and clip_bias_objective::

    surrogate_s    = w_s (A_s - cut_s) + clip(w_s) cut_s
    d J / d logp_t = (1/|y|) w_s (A_s - cut_s) / |s|,  t in s
    """
    with torch.no_grad():
        dtype = torch.promote_types(log_probs.dtype, torch.float32)
        sums = _SegmentSums.of(settings, loss_mask, turn_ids)
        segments, clip = sums.segments, settings.clip
        log_ratio = segments.pick(log_probs).to(dtype) - segments.pick(old_log_probs).to(dtype)
        kl_sum = torch.dot(log_ratio, log_ratio)
        log_ratio = segments.mean(log_ratio)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        bounded = ratio.clamp(clip.low, clip.high)
        side = torch.sign(ratio - bounded)
        advantage = segments.pick(advantages).to(dtype)
        cut = (segments.spread(side) * advantage).relu_()
        cut_advantage = sums.total(cut) * side
        kept = ratio * (sums.total(advantage) - cut_advantage)
        surrogate = sums.rows(torch.addcmul(kept, bounded, cut_advantage))
        clip_bias = _measure(sums, ratio, ratio * cut_advantage, cut, logit_scale)
        weights = row_weights(segments.row_lengths, settings.aggregation, denominator, dtype)
        counts = 1 if segments.lengths is None else segments.lengths
        stats = LossStats(
            tokens=clip_bias.tokens,
            signal=(advantage != 0).sum().to(dtype),
            clipped=clip_bias.clipped,
            ratio_sum=(ratio * counts).sum(),
            ratio_square_sum=(ratio.square() * counts).sum(),
            log_ratio_square_sum=kl_sum,
        )
        credit = kept * (log_ratio.abs() < MAX_LOG_RATIO)
        if segments.lengths is not None:
            credit = credit / segments.lengths.clamp(min=1)
        flat = credit.new_zeros(loss_mask.numel()).scatter_(0, segments.positions, segments.spread(credit))
        gradient = flat.view(loss_mask.shape).mul_(-weights[:, None])
    loss = _WithGradient.apply(log_probs, -(surrogate * weights).sum(), gradient.to(log_probs.dtype))
    return LossOutput(loss, clip_bias, stats, None)


def _measure(
    sums: _SegmentSums, ratio: Tensor, bias: Tensor, cut: Tensor, logit_scale: Tensor | None
) -> ClipBias:
    """Statistics of the clipping bias (S,); ``cut`` (N,) is abs(A_t) on clipped tokens."""
    lengths = sums.segments.row_lengths
    mean = sums.rows(bias) / lengths.clamp(min=1)
    ratio_square = ratio.square()
    square = sums.rows(ratio_square * sums.total(cut.square()))
    logit_square = torch.full_like(square, torch.nan)
    if logit_scale is not None:
        scaled = sums.segments.pick(logit_scale).to(cut.dtype).mul(cut).square_()
        logit_square = sums.rows(ratio_square * sums.total(scaled))
    present = (lengths > 0).to(mean.dtype)
    return ClipBias(
        trajectories=present.sum(),
        tokens=lengths.sum().to(mean.dtype),
        clipped=(cut > 0).sum().to(mean.dtype),
        mean_sum=mean.sum(),
        mean_square_sum=mean.square().sum(),
        square_sum=square.sum(),
        l2_sum=square.sqrt().sum(),
        logit_square_sum=logit_square.sum(),
        factor_sum=present.sum(),
    )
