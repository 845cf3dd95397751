"""Collating trajectories: the layout, shifted by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_train.learner.batch import Collected, collate, load_waiting, save_waiting

from ...trajectories import make_trajectory


def trajectory(
    name: str, token_ids: list[int], turn_ids: list[int], rewards: list[float], **fields: object
) -> Trajectory:
    spans = [[i for i, turn in enumerate(turn_ids) if turn == k] for k in range(max(turn_ids) + 1)]
    turns = tuple(
        Turn(k, "", "tool", "", None, "", {"item": rewards[k]}, (), start=span[0], end=span[-1] + 1)
        for k, span in enumerate(spans)
    )
    log_probs = np.where(np.asarray(turn_ids) >= 0, -0.5, 0.0).astype(np.float32)
    given = {"id": name, "token_ids": np.asarray(token_ids, np.int32), "rollout_log_probs": log_probs}
    return make_trajectory(turn_ids, turns=turns, reward=sum(rewards), **(given | fields))


def test_layout() -> None:
    long = trajectory("a", [1, 2, 3, 4, 5, 6, 7], [-1, -1, 0, 0, -1, 1, 1], [0.25, 1.0])
    short = trajectory("b", [1, 2, 3], [-1, 0, 0], [0.5], stop_reason=StopReason.ERROR, group_id="h")
    batch = collate([long, short], pad_id=9)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 9, 9, 9]]
    assert batch.turn_ids.tolist() == [[-1, 0, 0, -1, 1, 1], [0, 0, -1, -1, -1, -1]]
    assert batch.action_mask.int().tolist() == [[0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]]
    assert batch.token_rewards.tolist() == [[0, 0, 0.25, 0, 0, 1.0], [0, 0.5, 0, 0, 0, 0]]
    assert batch.rewards.tolist() == [1.25, 0.5]
    assert batch.group_ids.tolist() == [0, 1]
    assert batch.rollout_log_probs.tolist() == [[0, -0.5, -0.5, 0, -0.5, -0.5], [-0.5, -0.5, 0, 0, 0, 0]]


def test_rows_trim_padding_and_micro_batches_cover_all() -> None:
    rows = [trajectory(str(n), list(range(n)), [-1] + [0] * (n - 1), [1.0]) for n in (3, 9, 5, 7, 4)]
    batch = collate(rows)
    part = batch.rows([0, 4])
    assert part.token_ids.shape == (2, 4) and part.action_mask.shape == (2, 3) and part.ids == ("3", "4")
    index, pieces = zip(*batch.micro_batches(2), strict=True)
    assert [i.tolist() for i in index] == [[1, 3], [2, 4], [0]]
    assert [p.ids for p in pieces] == [("9", "7"), ("5", "4"), ("3",)]
    assert sum(int(p.action_mask.sum()) for p in pieces) == int(batch.action_mask.sum())
    assert torch.equal(batch.lengths, torch.tensor([3, 9, 5, 7, 4]))


def test_groups_stay_together_where_prompts_are_shared() -> None:
    """Groups by their longest trajectory, each from the longest on; without groups it is the order by length."""
    rows = [
        trajectory(name, list(range(n)), [-1] + [0] * (n - 1), [1.0], group_id=name[0])
        for name, n in (("a1", 3), ("b1", 9), ("a2", 8), ("b2", 4), ("c1", 8))
    ]
    pieces = [piece.ids for _, piece in collate(rows).micro_batches(2, by_group=True)]
    assert pieces == [("b1", "b2"), ("a2", "a1"), ("c1",)]
    lone = [
        trajectory(str(n), list(range(n)), [-1] + [0] * (n - 1), [1.0], group_id=str(n)) for n in (3, 9, 5)
    ]
    orders = [[i.tolist() for i, _ in collate(lone).micro_batches(2, by_group=by)] for by in (True, False)]
    assert orders[0] == orders[1] == [[1, 2], [0]]


def test_waiting_batches_keep_their_scores_whatever_a_filter_would_choose_now(tmp_path: Path) -> None:
    """A resume may raise the limits, and then other groups have a signal."""
    rows = [trajectory(str(n), list(range(n)), [-1] + [0] * (n - 1), [1.0]) for n in (3, 9, 5)]
    batch = collate(rows).rows([2, 0])
    batch = batch.with_fields(old_log_probs=torch.rand(batch.action_mask.shape))
    save_waiting(tmp_path, [Collected(rows, batch), Collected(rows[:1], None)])
    scored, empty = load_waiting(tmp_path, collate)
    assert scored.batch is not None and scored.batch.ids == ("5", "3")
    assert torch.equal(scored.batch.old_log_probs, batch.old_log_probs)
    assert torch.equal(scored.batch.token_ids, batch.token_ids)
    assert [t.id for t in scored.trajectories] == ["3", "9", "5"] and empty.batch is None
