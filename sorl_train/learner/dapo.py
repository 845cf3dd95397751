"""What DAPO (arXiv:2503.14476) does with a rollout batch: overlong trajectories, and groups without a signal.

**Overlong**: a soft punishment near the limit, its eq. 13, is added to the reward, and a filter drops trajectories from
the loss. With L_max the limit and L_cache the buffer::

    0                                    if |y| <= L_max - L_cache
    ((L_max - L_cache) - |y|) / L_cache  in between
    -1                                   at the limit

|y| counts the tokens of observations, too, as ``limits.max_trajectory_tokens`` does. A trajectory that ended because
the next observation would not fit (``max_tokens``) was at the limit. Records keep the task's reward. A filtered
trajectory has no token in the loss, but its reward stays in the baseline of its group, as in DAPO. An excluded one (an
outage) is in neither.

**Dynamic sampling**: a group whose total rewards are all equal has advantages of 0 where these compare total rewards,
which ``config.checks`` sees to. The engine replaces such groups with groups of other prompts, in up to
``rollout.dynamic_sampling`` further rounds, and trains on those that have a signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.config.run_settings import OverlongConfig, RolloutConfig
from sorl_train.learner.batch import Batch
from sorl_train.losses.advantages import are_equal, over_groups


def punishment(trajectory: Trajectory, limit: int, config: OverlongConfig) -> float:
    """What the reward of a trajectory loses, from 0 to ``overlong.penalty``; ``limit`` is in tokens."""
    if config.buffer is None:
        return 0.0
    if trajectory.stop_reason is StopReason.MAX_TOKENS:
        return config.penalty
    inside = len(trajectory.token_ids) - (limit - config.buffer)
    return config.penalty * min(max(inside / config.buffer, 0.0), 1.0)


def shape_and_filter(
    batch: Batch, trajectories: Sequence[Trajectory], limit: int, config: OverlongConfig
) -> Batch:
    """The batch of ``trajectories`` (in its order) with shaped rewards, and without the loss tokens of filtered ones.

    The punishment lies on a trajectory's last action token, where its turn's reward lies too.
    """
    if config.buffer is None and not config.excluded_stops:
        return batch
    rewards, token_rewards = batch.rewards.clone(), batch.token_rewards.clone()
    loss_mask = batch.loss_mask.clone()
    for row, trajectory in enumerate(trajectories):
        if trajectory.stop_reason.value in config.excluded_stops:
            loss_mask[row] = False
        lost, places = punishment(trajectory, limit, config), batch.action_mask[row].nonzero()
        if lost and len(places):
            rewards[row] -= lost
            token_rewards[row, int(places[-1])] -= lost
    return batch.with_fields(rewards=rewards, token_rewards=token_rewards, loss_mask=loss_mask)


def drop_rows_without_loss(batch: Batch) -> Batch:
    """The trajectories that have a token in the loss: the others would only make some mini-batches smaller."""
    has_tokens = batch.loss_mask.any(dim=1)
    return batch if bool(has_tokens.all()) else batch.rows(torch.nonzero(has_tokens)[:, 0])


def overlong_metrics(
    trajectories: Sequence[Trajectory], limit: int, config: OverlongConfig
) -> dict[str, float]:
    """What was shaped and filtered, over the trajectories that are not excluded; nothing where both are off.

    ``reward/overlong`` is what shaping added to the reward, on average; ``rollout/reward_mean`` is without it.
    """
    counted = [t for t in trajectories if not t.excluded]
    metrics: dict[str, float] = {}
    if not counted:
        return metrics
    if config.buffer is not None:
        lost = [punishment(t, limit, config) for t in counted]
        metrics["reward/overlong"] = -fmean(lost)
        metrics["rollout/overlong_punished_frac"] = fmean(value > 0 for value in lost)
    if config.excluded_stops:
        filtered = [t.stop_reason.value in config.excluded_stops for t in counted]
        metrics["rollout/overlong_filtered_frac"] = fmean(filtered)
    return metrics


def rows_with_signal(batch: Batch) -> Tensor:
    """Bool (B,): whether the total rewards of the row's group differ, and one of the group's tokens is in the loss."""
    _, group = torch.unique(batch.group_ids, return_inverse=True)
    totals = batch.token_rewards.sum(dim=1)
    differ = ~are_equal(over_groups(totals, group, "amin"), over_groups(totals, group, "amax"))
    return differ & (over_groups(batch.loss_mask.any(dim=1).float(), group, "amax") > 0)


def with_signal(batch: Batch) -> Batch:
    """The rows of groups with a signal; there may be none."""
    return batch.rows(torch.nonzero(rows_with_signal(batch))[:, 0])


def num_groups(batch: Batch | None) -> int:
    """How many groups have a row in the batch."""
    return 0 if batch is None else len(torch.unique(batch.group_ids))


def dynamic_metrics(
    trajectories: Sequence[Trajectory], batch: Batch | None, config: RolloutConfig
) -> dict[str, float]:
    """What a step cost: rollouts ``drawn`` and ``kept``, and the groups still ``missing``; nothing if it is off."""
    if not config.dynamic_sampling:
        return {}
    return {
        "rollout/dynamic_drawn": float(len(trajectories)),
        "rollout/dynamic_kept": 0.0 if batch is None else float(len(batch)),
        "rollout/dynamic_missing": float(config.batch_size // config.group_size - num_groups(batch)),
    }
