"""Advantages of a scored batch, the weights that correct for the sampler, and metrics of the batch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from sorl_train.algorithms import AdvantageKind, RatioLevel
from sorl_train.config.run_settings import CorrectionConfig
from sorl_train.config.settings import LossConfig, TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.dapo import drop_rows_without_loss
from sorl_train.learner.diagnostics import TURNS, quantiles
from sorl_train.learner.mismatch import turn_mismatch
from sorl_train.losses.advantages import (
    TurnGroups,
    first_of_turns,
    gae,
    group_advantages,
    on_tokens,
    turn_gae,
    turn_sums,
    turn_table,
    whiten,
)
from sorl_train.losses.correction import CorrectionSettings, correction_weights
from sorl_train.losses.terms import kl_penalty

PUBLISHED = {"none": (0.5, 1.0), "truncate": (0.5, 2.0), "band": (0.5, 5.0)}  # limits of TIS and IcePop


def prepare(batch: Batch, config: TrainConfig) -> tuple[Batch, dict[str, float]]:
    """Turn a scored rollout batch into what both engines train on, with advantages and corrections; also returns
    metrics.

    Trajectories without loss tokens are left out last: they took part in the comparison with the others.
    """
    batch = estimate_advantages(batch, config.algorithm.advantage, config.loss)
    metrics = state_metrics(batch)
    batch, corrected = correct(drop_rows_without_loss(batch), config.correction, config.algorithm.ratio)
    return batch, metrics | corrected


def estimate_advantages(batch: Batch, kind: AdvantageKind, loss: LossConfig) -> Batch:
    """Fill in advantages and returns, (B, T): GAE over the critic's values, or advantages from comparing rollouts.

    It takes the whole rollout batch, because groups and states lie across its pieces. Where the KL to the reference is
    the whole loss, both are 0.
    """
    rewards = batch.token_rewards
    if batch.ref_log_probs is not None and loss.kl_in == "reward":
        assert batch.old_log_probs is not None
        kl = kl_penalty(batch.old_log_probs, batch.ref_log_probs, loss.kl_type, batch.old_log_probs)
        rewards = rewards - loss.kl_coef * kl.masked_fill(~batch.action_mask, 0.0)
    if loss.kl_in == "alone":
        zeros = torch.zeros_like(rewards)
        return batch.with_fields(advantages=zeros, returns=zeros)
    if kind != "gae":
        advantages = _compared(batch, rewards, kind, loss)
        return batch.with_fields(advantages=advantages, returns=torch.zeros_like(advantages))
    assert batch.values is not None
    discount = {"gamma": loss.gamma, "lam": loss.gae_lambda}
    if loss.gae_level == "turn":
        advantages, returns = turn_gae(rewards, batch.values, batch.turn_ids, **discount)
    else:
        advantages, returns = gae(rewards, batch.values, batch.action_mask, **discount)
    if loss.whiten_advantages:
        advantages = whiten(advantages, batch.loss_mask)
    return batch.with_fields(advantages=advantages, returns=returns)


def _compared(batch: Batch, rewards: Tensor, kind: AdvantageKind, loss: LossConfig) -> Tensor:
    """Advantages (B, T) from comparing the rollouts of a group, given each token's reward (B, T)."""
    who = (batch.group_ids, batch.included)
    if kind == "group" and loss.group_level == "trajectory":
        totals = rewards.sum(dim=1)
        per_row = group_advantages(totals, *who, std=loss.group_std, baseline=loss.group_baseline)
        return per_row[:, None] * batch.action_mask
    turn_rewards, there = turn_sums(rewards, batch.turn_ids), turn_table(batch.turn_ids)
    groups = TurnGroups(turn_rewards, there, *who, std=loss.group_std, baseline=loss.group_baseline)
    if kind == "group":
        table = groups.by_return()
    elif kind == "turn_group":
        table = groups.by_turn(loss.turn_weight)
    else:
        assert batch.state_ids is not None
        states = first_of_turns(batch.state_ids, batch.turn_ids)
        table = groups.by_state(states, gamma=loss.gamma, weight=loss.turn_weight)
    return on_tokens(table, batch.turn_ids)


def correction_settings(given: CorrectionConfig, ratio: RatioLevel) -> CorrectionSettings:
    """The settings of a run whose algorithm has this ratio, with the published limits where it gives none."""
    low, high = PUBLISHED[given.mode]
    return CorrectionSettings(
        mode=given.mode,
        level=ratio if given.level == "auto" else given.level,
        low=low if given.low is None else given.low,
        high=high if given.high is None else given.high,
        sequence_mask=given.sequence_mask,
    )


def correct(batch: Batch, given: CorrectionConfig, ratio: RatioLevel) -> tuple[Batch, dict[str, float]]:
    """Fill in ``correction`` as configured; also returns its ``loss/`` metrics. It is the same batch if that is off."""
    if not given.is_on:
        return batch, {}
    assert batch.old_log_probs is not None  # the engine computes them before the update if ``is_on``
    old, sampled, settings = batch.old_log_probs, batch.rollout_log_probs, correction_settings(given, ratio)
    weights, metrics = correction_weights(old, sampled, batch.loss_mask, batch.turn_ids, settings)
    return batch.with_fields(correction=weights), metrics


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


def state_metrics(batch: Batch) -> dict[str, float]:
    """The share of the turns that another turn of the group can be compared with, as it started in the same state.

    It takes the whole rollout batch, because trajectories that are filtered afterwards took part in the comparison.
    """
    if batch.state_ids is None:
        return {}
    taking_part = turn_table(batch.turn_ids) & batch.included[:, None]
    states = first_of_turns(batch.state_ids, batch.turn_ids)[taking_part]
    _, state, count = torch.unique(states, return_inverse=True, return_counts=True)
    return {"loss/shared_state_frac": float((count[state] > 1).double().mean())}


def mismatch_metrics(log_probs: Tensor, batch: Batch) -> dict[str, float]:
    """How far the trainer's ``log_probs`` (B, T) are from the sampler's own, over the loss tokens.

    The KL is the k3 estimate of KL(sampler || trainer), over all tokens and by turn. Ratios are trainer over sampler.
    ``sampler.max_mismatch`` limits the mean absolute difference, over all tokens and in the worst turn, but for what
    ``sampler.top_p`` explains: the sampler's are those of the truncated distribution.
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
    turns = batch.turn_ids[mask].clamp(max=TURNS - 1)
    for turn in range(int(turns.max()) + 1):
        metrics[f"rollout/mismatch_kl_turn{turn}"] = float(kl[turns == turn].mean())
    return metrics
