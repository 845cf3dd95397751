"""The KL to the reference model: per-token estimates, in the loss or in the reward."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from sorl_train.algorithms import KLKind, check_choice
from sorl_train.losses.segments import MAX_LOG_RATIO


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: KLKind = "k2") -> Tensor:
    """Per-token (B, T) estimate of KL(policy || reference) from tokens the policy sampled.

    With d = log pi - log pi_ref, clamped to +-20: ``k1`` = d, unbiased, the one for a penalty in the reward;
    ``k2`` = d^2 / 2, whose gradient is that of the KL; ``k3`` = exp(-d) - 1 + d, unbiased and never negative.
    As a term of the loss, ``k1`` has a gradient of 0 in expectation, so it has no effect. The gradient of ``k2`` is d
    and that of ``k3`` is 1 - exp(-d). At d = -19, a token that has become very unlikely, these are -19 and -1.8e8.
    """
    check_choice("kl kind", kind, get_args(KLKind))
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    diff = (log_probs.to(dtype) - ref_log_probs.to(dtype)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return diff
    if kind == "k2":
        return 0.5 * diff.square()
    return torch.expm1(-diff) + diff
