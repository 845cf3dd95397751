"""What tests of losses share: ``policy_loss`` with its settings as keywords, and random batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sorl_train.losses import policy
from sorl_train.losses.policy import ClipRange, LossOutput, LossSettings


def policy_loss(
    *tensors: Tensor,
    ratio_level: Any,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    denominator: float | None = None,
    logit_scale: Tensor | None = None,
    correction: Tensor | None = None,
    **settings: Any,
) -> LossOutput:
    chosen = LossSettings(ratio_level, clip=ClipRange(clip_eps, clip_eps_high, dual_clip), **settings)
    given = {"denominator": denominator, "logit_scale": logit_scale, "correction": correction}
    return policy.policy_loss(*tensors, chosen, **given)  # type: ignore[misc, arg-type]


def drawn(seed: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Log-probabilities some way off those of the sampler, a mask with several turns, advantages of sequences."""
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(rows, width, dtype=dtype, generator=g)
    return {
        "mask": torch.rand(rows, width, generator=g) < 0.6,
        "old": old,
        "log_probs": (old + 0.5 * torch.randn(rows, width, dtype=dtype, generator=g)).requires_grad_(),
        "advantages": torch.randn(rows, 1, dtype=dtype, generator=g).expand(rows, width).contiguous(),
    }
