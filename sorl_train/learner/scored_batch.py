"""Advantages of a scored batch, and the metrics that depend on the batch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_train.algorithms import AdvantageKind
from sorl_train.config.settings import LossConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.diagnostics import quantiles
from sorl_train.learner.mismatch import turn_mismatch
from sorl_train.losses.advantages import gae, group_advantages, whiten
from sorl_train.losses.kl import kl_in_reward, kl_penalty


def estimate_advantages(batch: Batch, kind: AdvantageKind, loss: LossConfig) -> Batch:
    """Fill in advantages and returns, (B, T): GAE over the critic's values, or group advantages."""
    rewards = batch.token_rewards
    if batch.ref_log_probs is not None and loss.kl_in == "reward":
        assert batch.old_log_probs is not None
        kl = kl_penalty(batch.old_log_probs, batch.ref_log_probs, loss.kl_type)
        rewards = kl_in_reward(rewards, kl, batch.action_mask, loss.kl_coef)
    if kind == "group":
        totals = rewards.sum(dim=1)
        per_row = group_advantages(totals, batch.group_ids, batch.included, std=loss.group_std)
        advantages = per_row[:, None] * batch.action_mask
        return batch.with_fields(advantages=advantages, returns=torch.zeros_like(advantages))
    assert batch.values is not None
    advantages, returns = gae(rewards, batch.values, batch.action_mask, gamma=loss.gamma, lam=loss.gae_lambda)
    if loss.whiten_advantages:
        advantages = whiten(advantages, batch.loss_mask)
    return batch.with_fields(advantages=advantages, returns=returns)


def batch_metrics(batch: Batch) -> dict[str, float]:
    """``loss/`` metrics that depend on the batch alone, over its action tokens."""
    assert batch.advantages is not None and batch.returns is not None
    mask = batch.loss_mask
    advantages = batch.advantages[mask].double()
    metrics = {
        "loss/advantage_mean": float(advantages.mean()),
        "loss/advantage_std": float(advantages.std(correction=0)),
    }
    if batch.old_log_probs is not None:
        metrics |= mismatch_metrics(batch.old_log_probs, batch)
    if batch.values is not None:
        returns, error = batch.returns[mask].double(), (batch.returns - batch.values)[mask].double()
        variance = float(returns.var(correction=0))
        explained = 1.0 - float(error.var(correction=0)) / variance if variance > 1e-12 else 0.0
        metrics["loss/explained_variance"] = explained
    return metrics


def mismatch_metrics(log_probs: Tensor, batch: Batch) -> dict[str, float]:
    """How far the trainer's ``log_probs`` (B, T) are from the sampler's own, over the loss tokens.

    The KL is the k3 estimate of KL(sampler || trainer), over all tokens and by turn. Ratios are trainer over sampler.
    ``sampler.max_mismatch`` limits the mean absolute difference, over all tokens and in the worst turn.
    """
    mask = batch.loss_mask
    gap = (log_probs - batch.rollout_log_probs)[mask].double()
    kl = gap.exp() - 1.0 - gap
    low, high = quantiles(gap.exp(), (0.01, 0.99))
    metrics = {
        "rollout/mismatch_kl": float(kl.mean()),
        "rollout/mismatch_mean": float(gap.abs().mean()),
        "rollout/mismatch_worst_turn": float(turn_mismatch(log_probs, batch, mask).max()),
        "rollout/mismatch_max": float(gap.abs().max()),
        "rollout/mismatch_ratio_p01": low,
        "rollout/mismatch_ratio_p99": high,
    }
    turns = batch.turn_ids[mask]
    for turn in range(int(turns.max()) + 1):
        metrics[f"rollout/mismatch_kl_turn{turn}"] = float(kl[turns == turn].mean())
    return metrics
