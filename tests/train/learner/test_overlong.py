"""Shaped rewards and filtered trajectories, against values computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.errors import UserError
from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.config.run_settings import OverlongConfig
from sorl_train.config.settings import LossConfig
from sorl_train.learner.advantages import estimate_advantages, prepare
from sorl_train.learner.batch import collate
from sorl_train.learner.dapo import drop_rows_without_loss, overlong_metrics, punishment, shape_and_filter
from sorl_train.learner.update_settings import mini_batches

from ..conftest import short_config, train_short
from .test_batch import trajectory


def of_length(tokens: int, reward: float = 1.0, **fields: Any) -> Trajectory:
    """Two tokens of prompt, an observation of one token before the last two tokens, which are the second turn."""
    turns = [-1, -1, *[0] * (tokens - 5), -1, 1, 1]
    return trajectory(f"t{tokens}", list(range(tokens)), turns, [0.0, reward], **fields)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(8, 0.0), (16, 0.0), (17, 0.25), (18, 0.5), (19, 0.75), (20, 1.0)]
)
def test_the_punishment_is_eq_13_by_hand(tokens: int, expected: float) -> None:
    """A limit of 20 tokens with a buffer of 4: (16 - |y|) / 4 from 16 tokens on, observations included."""
    config = OverlongConfig(buffer=4)
    assert punishment(of_length(tokens), 20, config) == expected
    assert punishment(of_length(tokens), 20, OverlongConfig(buffer=4, penalty=0.4)) == pytest.approx(
        0.4 * expected
    )
    assert punishment(of_length(tokens), 20, OverlongConfig()) == 0.0
    no_room = of_length(
        12, stop_reason=StopReason.MAX_TOKENS
    )  # for the next observation: it was at the limit
    assert punishment(no_room, 20, config) == 1.0


def test_the_learners_reward_changes_and_the_records_does_not() -> None:
    found = [of_length(10), of_length(18), of_length(20, reward=0.0)]
    batch = shape_and_filter(collate(found), found, 20, OverlongConfig(buffer=4))
    assert batch.rewards.tolist() == [1.0, 0.5, -1.0]
    assert batch.token_rewards.sum(dim=1).tolist() == [1.0, 0.5, -1.0]
    # on the last token of the policy, which is column length - 2
    assert [float(batch.token_rewards[row, t.token_ids.size - 2]) for row, t in enumerate(found)] == [
        1,
        0.5,
        -1,
    ]
    assert [t.reward for t in found] == [1.0, 1.0, 0.0]
    metrics = overlong_metrics(found, 20, OverlongConfig(buffer=4))
    assert metrics == {"reward/overlong": -0.5, "rollout/overlong_punished_frac": pytest.approx(2 / 3)}
    assert overlong_metrics(found, 20, OverlongConfig()) == {}


def test_a_filtered_trajectory_has_no_loss_but_counts_in_its_groups_baseline() -> None:
    """Rewards 1, 0 and 0 (cut off): mean 1/3. Without the third the mean would be 1/2."""
    cut = of_length(20, reward=0.0, stop_reason=StopReason.MAX_TOKENS)
    found = [of_length(10), of_length(12, reward=0.0), cut]
    config = OverlongConfig(exclude="max_tokens, invalid")
    batch = shape_and_filter(collate(found), found, 20, config)
    assert batch.included.all() and batch.loss_mask.any(dim=1).tolist() == [True, True, False]
    assert torch.equal(batch.action_mask, collate(found).action_mask)
    scored = estimate_advantages(batch, "group", LossConfig(group_std=False, kl_coef=0.0))
    assert scored.advantages is not None
    by_row = [float(scored.advantages[row][batch.action_mask[row]][0]) for row in range(3)]
    assert by_row == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    trained = drop_rows_without_loss(scored)
    assert trained.ids == ("t10", "t12") and trained.token_ids.shape == (2, 12)
    assert overlong_metrics(found, 20, config) == {"rollout/overlong_filtered_frac": pytest.approx(1 / 3)}


def test_filtered_trajectories_do_not_make_mini_batches_smaller() -> None:
    """8 of 32 are left: one optimizer step on 8, not four on two or so. Both engines train on what this returns."""
    found = [
        of_length(
            6 + row % 9, reward=row % 3, stop_reason=StopReason.MAX_TOKENS if row % 4 else StopReason.ANSWER
        )
        for row in range(32)
    ]
    config = short_config(
        algo="so_grpo", rollout__group_size=4, rollout__batch_size=32, overlong__exclude="max_tokens"
    )
    batch = shape_and_filter(collate(found), found, 20, config.overlong)
    prepared, _ = prepare(batch.with_fields(old_log_probs=batch.rollout_log_probs), config)
    assert [len(mini) for mini in mini_batches(prepared, config, 1)] == [8] * config.update.epochs
    assert prepared.loss_mask.any(dim=1).all() and prepared.advantages is not None


def test_excluded_trajectories_are_in_no_figure() -> None:
    """An outage at the limit was not the policy's doing."""
    found = [of_length(20), of_length(20, stop_reason=StopReason.ERROR)]
    config = OverlongConfig(buffer=4, exclude="max_turns")
    assert overlong_metrics(found[:1], 20, config) == overlong_metrics(found, 20, config)
    assert overlong_metrics(found[1:], 20, config) == {}


# --- whole runs -------------------------------------------------------------------------------------------------


def test_a_buffer_longer_than_the_tasks_limit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"overlong.buffer 100000 must be below the \d+ tokens that task minihop"
    ):
        train_short(tmp_path / "run", overlong__buffer=100_000)
