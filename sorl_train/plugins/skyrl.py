"""SkyRL's policy losses. SkyRL hands over advantages that carry the weight of the loss's mean already, and adds up.

It follows SkyRL's ``register_policy_loss`` (August 2026). Because the advantages come in a unit of SkyRL's own, the
norm of the clipping bias is taken relative to their root mean square, over the whole mini-batch. That is the ``rms``
norm where advantages have the variance 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sorl_train.algorithms import ALGORITHMS
from sorl_train.plugins.objective import clip_range, loss_algorithms, objective_of_process


def register(registry: Any) -> None:
    """Register every algorithm as ``sorl_<name>`` with SkyRL's ``PolicyLossRegistry``, before ``sync_registries()``."""
    for algorithm in loss_algorithms():
        registry.register(f"sorl_{algorithm}", functools.partial(policy_loss, algorithm=algorithm))


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    algorithm: str,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """The sum over the tokens of one micro-batch, tensors (B, T), and its metrics.

    Args:
        config: reads ``eps_clip_low`` and ``eps_clip_high``.
        loss_mask: None: every token.
        rollout_logprobs: not used; SkyRL's correction for the sampler is not applied.
        algorithm: a name of ``loss_algorithms``.
        options: ``ratio`` and ``clip_bias_delta`` of ``Objective``.
    """
    clip = clip_range(ALGORITHMS[algorithm], eps=config.eps_clip_low, eps_high=config.eps_clip_high)
    output = objective_of_process(algorithm=algorithm, clip=clip, relative=True, **options).loss(
        log_probs,
        old_log_probs,
        advantages,
        torch.ones_like(log_probs) if loss_mask is None else loss_mask,
        aggregation="token_mean",
        denominator=1.0,
    )
    stats = output.stats.metrics()
    return output.loss, {"clip_ratio": stats["clip_frac"], "approx_kl": stats["approx_kl"]}
