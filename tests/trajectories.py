"""Trajectories of which a test states only what matters to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sorl_env.trajectory import StopReason, Trajectory


def make_trajectory(turn_ids: Sequence[int], **fields: Any) -> Trajectory:
    """The tokens 1, 2, .., sampled by the policy where ``turn_ids`` is not -1, with other fields as given."""
    turns = np.asarray(turn_ids, dtype=np.int16)
    usual = dict.fromkeys(("id", "group_id", "task", "source", "split", "example_id", "prompt"), "")
    usual |= {"turns": (), "reward": 0.0, "reward_items": {}, "stop_reason": StopReason.ANSWER}
    usual |= {"token_ids": np.arange(1, len(turns) + 1, dtype=np.int32), "turn_ids": turns}
    usual |= {"action_mask": turns >= 0, "rollout_log_probs": np.zeros(len(turns), np.float32)}
    return Trajectory(**(usual | fields))
