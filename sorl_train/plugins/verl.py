"""verl's policy losses: importing this module registers the algorithms as ``actor.policy_loss.loss_mode``.

verl imports it through the entry point of the group ``verl.plugins``. Written for and tested with verl 0.9.1. A name
that verl has itself (``gspo``, ``sapo``, ``cispo``) is registered with ``sorl_`` in front. What verl's config has a
word for stays there: the clip range, ``loss_agg_mode``, advantages, entropy and KL.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

from sorl_train.algorithms import ALGORITHMS, Aggregation, Algorithm, check_choice
from sorl_train.plugins.objective import clip_range, loss_algorithms, objective_of_process


def register(name: str, algorithm: str | Algorithm, **options: Any) -> None:
    """Register a policy loss with verl as the ``loss_mode`` ``name``; ValueError if verl knows that name already.

    ``algorithm`` is a name of ``loss_algorithms``, or an ``Algorithm`` of your own. ``options`` are those of
    ``Objective``: ``ratio``, ``clip_bias_norm``, ``clip_bias_delta``.
    """
    if name in POLICY_LOSS_REGISTRY:
        raise ValueError(f"verl has a loss_mode {name!r} already: take another name, such as 'sorl_{name}'")
    register_policy_loss(name)(functools.partial(policy_loss, algorithm=algorithm, options=options))


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    *,
    algorithm: str | Algorithm,
    options: dict[str, Any],
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one micro-batch as verl asks for it, tensors (B, T), and its metrics.

    Raises ValueError for an unknown ``loss_agg_mode``, or a normalized algorithm with Megatron.
    """
    row = ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm
    if row.normalize and config.strategy == "megatron":
        raise ValueError(
            "a normalized algorithm needs the loss on every rank, and Megatron's first pipeline stages have none: "
            "take strategy=fsdp"
        )
    low, high = config.clip_ratio_low, config.clip_ratio_high
    level = options.get("ratio", "auto")
    is_sequence = (row.ratio if level == "auto" else level) == "sequence"
    clip = clip_range(
        row,
        eps=config.clip_ratio if low is None else low,
        eps_high=config.clip_ratio if high is None else high,
        dual=None if is_sequence else config.clip_ratio_c,  # as in verl's own losses
        tau_pos=config.tau_pos,
        tau_neg=config.tau_neg,
    )
    objective = objective_of_process(algorithm=algorithm, clip=clip, **options)
    mean, denominator = _mean(response_mask.bool(), loss_agg_mode, config.global_batch_info)
    output = objective.loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        aggregation=mean,
        denominator=denominator,
        correction=rollout_is_weights,
    )
    mask = response_mask.bool()
    metrics = {
        "actor/pg_clipfrac": output.stats.metrics()["clip_frac"],
        "actor/ppo_kl": float((old_log_prob - log_prob.detach())[mask].sum() / mask.sum().clamp(min=1)),
        "actor/pg_clipfrac_lower": 0.0,
    }
    # of the last optimizer step, because this one's comes later
    metrics |= {f"actor/sorl_{name}": value for name, value in objective.steps.metrics.items()}
    return output.loss, metrics


# Our aggregation of each loss_agg_mode of verl.
_MEANS: dict[str, Aggregation] = {
    "seq-mean-token-mean": "trajectory_mean",
    "token-mean": "token_mean",
    "token-sum": "token_mean",
    "seq-mean-token-sum": "token_mean",
    "seq-mean-token-sum-norm": "token_mean",
}


def _mean(mask: Tensor, mode: str, info: Mapping[str, Any]) -> tuple[Aggregation, float]:
    """verl's mean (``agg_loss``) and its denominator, with what is known of the whole mini-batch."""
    check_choice("loss_agg_mode", mode, tuple(_MEANS))
    ranks = info.get("dp_size") or 1
    whole = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size")
    if whole is None and ranks > 1 and mode != "token-sum":
        raise ValueError(f"loss_agg_mode {mode!r} on {ranks} ranks needs the size of the whole mini-batch")
    if mode == "token-sum":
        total = 1.0
    elif mode == "token-mean":
        total = float(mask.sum() if whole is None else whole)
    else:
        total = float(mask.any(dim=1).sum() if whole is None else whole)
    if mode == "seq-mean-token-sum-norm":
        total *= float(info.get("loss_scale_factor") or mask.shape[1])
    return _MEANS[mode], total / ranks  # verl averages gradients over ranks


def _register_all() -> None:
    for algorithm in loss_algorithms():
        name = algorithm if algorithm not in POLICY_LOSS_REGISTRY else f"sorl_{algorithm}"
        if name not in POLICY_LOSS_REGISTRY:  # a second import
            register(name, algorithm)


_register_all()
