"""Importance ratios of segments, and which tokens a clipped surrogate cuts."""

from __future__ import annotations

from torch import Tensor

from sorl_train.losses.segments import Segments

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: beyond any use, and its square still far from float32's end


def segment_ratios(segments: Segments, log_ratio: Tensor) -> Tensor:
    """(N,) log-ratios of the loss tokens -> (S,) importance ratios of the segments, their geometric means."""
    return _ratios(_segment_log_ratios(segments, log_ratio))


def _segment_log_ratios(segments: Segments, log_ratio: Tensor) -> Tensor:
    return segments.total(log_ratio) / segments.sizes


def _ratios(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_tokens(ratio: Tensor, advantage: Tensor, clip_eps: float, clip_eps_high: float | None) -> Tensor:
    """(N,) bool: the tokens that ``policy_loss`` clips, from their ratios (N,) in the loss and advantages (N,)."""
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return ((advantage > 0) & (ratio > 1.0 + high)) | ((advantage < 0) & (ratio < 1.0 - clip_eps))
