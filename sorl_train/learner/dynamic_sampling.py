"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups teach something, and what it cost to find them.

A group whose total rewards are all equal has advantages of 0 where these compare total rewards, which
``config.checks`` sees to. The engine replaces such groups with groups of other prompts, in up to
``rollout.dynamic_sampling`` further rounds, and trains on those that have a signal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sorl_env.trajectory import Trajectory
from sorl_train.config.run_settings import RolloutConfig
from sorl_train.learner.batch import Batch
from sorl_train.losses.advantages import are_equal


def rows_with_signal(batch: Batch) -> Tensor:
    """Bool (B,): whether the total rewards of the row's group differ, and one of the group's tokens is in the loss."""
    _, group = torch.unique(batch.group_ids, return_inverse=True)
    totals = batch.token_rewards.sum(dim=1)

    def over_groups(values: Tensor, how: str) -> Tensor:
        empty = values.new_zeros(int(group.max()) + 1)
        return empty.scatter_reduce(0, group, values, how, include_self=False)[group]

    differ = ~are_equal(over_groups(totals, "amin"), over_groups(totals, "amax"))
    return differ & (over_groups(batch.loss_mask.any(dim=1).float(), "amax") > 0)


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
