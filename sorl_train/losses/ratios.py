"""Importance ratios."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: larger than any useful ratio, and float32 can still square it


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), with the log-ratio clamped to +-20. Beyond the clamp the ratio has no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
