"""``policy_loss`` with its settings as keywords, since tests try many combinations of them."""

from __future__ import annotations

from typing import Any

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
