"""The replay buffer: what it keeps, which trajectory joins which group, and the ratio and advantage that it gets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.config.run_settings import OverlongConfig, ReplayConfig
from sorl_train.config.settings import LossConfig
from sorl_train.learner.advantages import estimate_advantages
from sorl_train.learner.batch import Collected, collate
from sorl_train.learner.dapo import shape_and_filter
from sorl_train.learner.replay import Mixed, ReplayBuffer, replay_metrics
from sorl_train.learner.update_settings import mini_batches, steps_of_batch
from sorl_train.losses.policy import LossSettings, policy_loss
from sorl_train.rollout.metrics import is_success

from ..conftest import short_config
from .test_batch import trajectory


def rollouts(step: int, question: str, rewards: Sequence[float], **fields: Any) -> list[Trajectory]:
    """The group of a question in a training step. Its members have 3, 4, .. tokens, of which 2, 3, .. are actions."""
    found = []
    for number, reward in enumerate(rewards):
        tokens = [1, *range(2, 4 + number)]
        one = trajectory(
            f"s{step}-{question}/{number}",
            tokens,
            [-1, *[0] * (len(tokens) - 1)],
            [reward],
            group_id=f"s{step}-{question}",
            **fields,
        )
        turns = tuple(dataclasses.replace(turn, policy_version=step - 1) for turn in one.turns)
        prompt = f"Where is {question}?"
        found.append(dataclasses.replace(one, turns=turns, example_id=question, prompt=prompt))
    return found


def recorded(name: str) -> float:
    """The old log-probability of each token of a trajectory, as ``scored`` gives it."""
    return -0.25 - (sum(map(ord, name)) % 17) / 64


def scored(trajectories: Sequence[Trajectory], reference: bool = False) -> Collected:
    """The trajectories of a step, with old log-probabilities as if the trainer had computed them."""
    kept = [t for t in trajectories if not t.excluded]
    if not kept:
        return Collected(list(trajectories), None)
    batch = collate(kept)
    old = torch.tensor([recorded(t.id) for t in kept])[:, None] * batch.action_mask
    fields = {"old_log_probs": old} | ({"ref_log_probs": 2 * old} if reference else {})
    return Collected(list(trajectories), batch.with_fields(**fields))


def empty(**settings: Any) -> ReplayBuffer:
    return ReplayBuffer(ReplayConfig(**settings), is_success)


def take(buffer: ReplayBuffer, number: int, *groups: list[Trajectory], **options: Any) -> Mixed:
    """The training step ``number`` on these groups."""
    return buffer.step(scored([t for group in groups for t in group], **options), number - 1, collate)


def ids(mixed: Mixed) -> list[str]:
    assert mixed.batch is not None
    return list(mixed.batch.ids)


def stored(buffer: ReplayBuffer) -> list[str]:
    return [one.trajectory.id for one in buffer.stored]


# --- which trajectory, and what it gets ---------------------------------------------------------------------------


def test_a_past_success_replaces_a_failure_with_its_ratio_and_advantage_by_hand() -> None:
    """Step 1: a has one success, b none. Step 3: both fail, so a's success takes the place of a's last failure.

    a's rewards are then 0, 0 and 1, with mean 1/3 and sample deviation sqrt(1/3): advantages -1/sqrt(3), -1/sqrt(3) and
    2/sqrt(3). The current policy gives each token e^.1 times its old probability, but 1.5 times the new rollouts':
    PPO's surrogate cuts 1.5 to 1.2 only where the advantage is positive.
    """
    buffer = empty(size=8)
    first = take(buffer, 1, rollouts(1, "a", [1, 0, 0]), rollouts(1, "b", [0, 0, 0]))
    assert not first.replayed and first.batch is not None and first.batch.replayed is None
    assert stored(buffer) == ["s1-a/0"]

    mixed = take(buffer, 3, rollouts(3, "a", [0, 0, 0]), rollouts(3, "b", [0, 0, 0]))
    assert ids(mixed) == ["s3-a/0", "s3-a/1", "s1-a/0", "s3-b/0", "s3-b/1", "s3-b/2"]
    assert [t.id for t in mixed.replayed] == ["s1-a/0"] and mixed.ages == [2]
    batch = mixed.batch
    assert batch is not None and batch.old_log_probs is not None and batch.replayed is not None
    assert batch.replayed.tolist() == [False, False, True, False, False, False]
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    for row, name in enumerate(batch.ids):  # the log-probabilities of when it was new, to the bit
        assert torch.equal(batch.old_log_probs[row], recorded(name) * batch.action_mask[row])
    batch = estimate_advantages(batch, "group", LossConfig(kl_coef=0.0))
    assert batch.advantages is not None and batch.old_log_probs is not None
    by_row = [float(batch.advantages[row][batch.action_mask[row]][0]) for row in range(6)]
    low, high = -1 / math.sqrt(3), 2 / math.sqrt(3)
    assert by_row == pytest.approx([low, low, high, 0, 0, 0], abs=1e-5)

    drift = torch.where(batch.replayed[:, None], 0.1, math.log(1.5)) * batch.action_mask
    now = (batch.old_log_probs + drift).requires_grad_()
    settings = LossSettings("token")
    output = policy_loss(
        now,
        batch.old_log_probs,
        batch.advantages,
        batch.loss_mask,
        batch.turn_ids,
        settings,
        denominator=6.0,
    )
    expected = -(2 * 1.5 * low + math.exp(0.1) * high) / 6
    assert float(output.loss.detach()) == pytest.approx(expected, abs=1e-5)
    metrics = replay_metrics(mixed, buffer)
    assert metrics == {
        "rollout/replay_size": 1.0,
        "rollout/replay_share": 1 / 6,
        "rollout/replay_age_mean": 2.0,
        "rollout/replay_age_max": 2.0,
    }


@pytest.mark.parametrize(
    ("rewards", "replayed"),
    [
        ([0, 0], ["s2-a/1"]),
        ([-1, -1, -1], ["s2-a/1"]),
        ([0, 1], []),  # there is a success
        ([1, 1], []),
        ([0.4, 0], []),  # there is none, but a signal
        ([0], []),  # nothing would be left to compare with
    ],
)
def test_only_a_group_without_success_and_signal_gets_the_newest_success(
    rewards: list[float], replayed: list[str]
) -> None:
    buffer = empty(size=8)
    take(buffer, 1, rollouts(1, "a", [0, 1]))
    take(buffer, 2, rollouts(2, "a", [1, 1]), rollouts(2, "b", [1, 1]))
    mixed = take(buffer, 3, rollouts(3, "a", rewards))
    assert [t.id for t in mixed.replayed] == replayed
    assert mixed.batch is not None and len(mixed.batch) == len(rewards)


def test_questions_are_the_same_by_id_and_text() -> None:
    buffer = empty(size=8)
    take(buffer, 1, rollouts(1, "a", [1, 1]))
    other = [dataclasses.replace(t, prompt="Who?") for t in rollouts(2, "a", [0, 0])]
    assert not take(buffer, 2, other).replayed


def test_several_successes_leave_a_failure_and_no_trajectory_is_in_two_groups() -> None:
    """Three failures have room for two successes. A second group of the same question gets the ones that are left."""
    buffer = empty(size=8, per_group=9)
    take(buffer, 1, rollouts(1, "a", [1, 1, 1]))
    again = [dataclasses.replace(t, id=f"x{t.id}", group_id="x") for t in rollouts(2, "a", [0, 0, 0])]
    mixed = take(buffer, 2, rollouts(2, "a", [0, 0, 0]), again)
    assert ids(mixed) == ["s2-a/0", "s1-a/2", "s1-a/1", "xs2-a/0", "xs2-a/1", "s1-a/0"]
    assert mixed.batch is not None and mixed.batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]


def test_recent_adds_the_newest_whatever_their_rewards_by_hand() -> None:
    """Rewards 1 and 0 are joined by 0 (of step 3) and 0 (of step 1): their mean is 1/4, and nothing is divided."""
    buffer = empty(size=8, mode="recent", per_group=2)
    take(buffer, 1, rollouts(1, "a", [1, 0]), reference=True)
    take(buffer, 2, rollouts(2, "b", [1, 0]), reference=True)
    take(buffer, 3, rollouts(3, "c", [0]), rollouts(3, "a", [0]), reference=True)
    assert stored(buffer) == ["s1-a/0", "s1-a/1", "s2-b/0", "s2-b/1", "s3-c/0", "s3-a/0"]
    mixed = take(buffer, 5, rollouts(5, "a", [1, 0]), reference=True)
    assert ids(mixed) == ["s5-a/0", "s5-a/1", "s3-a/0", "s1-a/1"] and mixed.ages == [2, 4]
    batch = mixed.batch
    assert batch is not None and batch.old_log_probs is not None and batch.ref_log_probs is not None
    assert torch.equal(batch.ref_log_probs, 2 * batch.old_log_probs)
    loss = LossConfig(kl_coef=0.0, group_std=False)
    advantages = estimate_advantages(batch, "group", loss).advantages
    assert advantages is not None
    assert [float(row[0]) for row in advantages] == [0.75, -0.25, -0.25, -0.25]


def test_added_trajectories_make_mini_batches_larger_and_not_more() -> None:
    """16 rollouts and 4 replayed ones are still two mini-batches, so the schedule's learning rates fit."""
    config = short_config(algo="so_grpo", rollout__group_size=4)
    found = [t for k in range(5) for t in rollouts(1, str(k), [1, 0, 0, 1])]
    assert [len(mini) for mini in mini_batches(collate(found), config, 1)] == [10, 10]
    assert steps_of_batch(config.rollout.batch_size, config.update) == 2
    assert [len(mini) for mini in mini_batches(collate(found[:16]), config, 1)] == [8, 8]


# --- what is kept -------------------------------------------------------------------------------------------------


def test_no_trajectory_is_older_than_allowed() -> None:
    """Sampled by the weights of version 0, with an age of at most 2: replayed at version 2, gone at version 3."""
    for number, expected in ((3, ["s1-a/0"]), (4, [])):
        buffer = empty(size=8, max_age=2)
        take(buffer, 1, rollouts(1, "a", [1, 0]))
        mixed = take(buffer, number, rollouts(number, "a", [0, 0]))
        assert [t.id for t in mixed.replayed] == stored(buffer) == expected


def test_the_oldest_are_dropped_from_a_full_buffer() -> None:
    buffer = empty(size=3)
    take(buffer, 1, rollouts(1, "a", [1, 1]))
    take(buffer, 2, rollouts(2, "b", [1, 0, 1]))
    assert stored(buffer) == ["s1-a/1", "s2-b/0", "s2-b/2"]


def test_an_outage_and_a_filtered_stop_are_never_stored() -> None:
    buffer = empty(size=9, mode="recent")
    out = {"stop_reason": StopReason.ERROR}
    take(buffer, 1, rollouts(1, "a", [1, 0]), rollouts(1, "b", [1, 1], **out))
    assert stored(buffer) == ["s1-a/0", "s1-a/1"]
    nothing = take(buffer, 2, rollouts(2, "a", [0, 0], **out))
    assert nothing == Mixed(None) and replay_metrics(nothing, buffer) == {"rollout/replay_size": 2.0}
    # a group of which one member is left: its past joins it, and the lost ones do not come back
    half = [*rollouts(3, "a", [0]), *rollouts(3, "a", [0, 0], **out)[1:]]
    assert ids(take(buffer, 3, half)) == ["s3-a/0", "s1-a/1"]
    late = rollouts(4, "c", [1, 1], stop_reason=StopReason.MAX_TURNS)
    collected = scored(late)
    assert collected.batch is not None
    filtered = shape_and_filter(collected.batch, late, 99, OverlongConfig(exclude="max_turns"))
    buffer.step(Collected(late, filtered), 3, collate)
    assert stored(buffer) == ["s1-a/0", "s1-a/1", "s3-a/0"]


@pytest.mark.parametrize("reference", [False, True])
def test_a_saved_buffer_comes_back_to_the_bit(reference: bool, tmp_path: Path) -> None:
    buffer, again = (empty(size=8, mode="recent", per_group=3) for _ in range(2))
    buffer.save(tmp_path)  # an empty one
    again.load(tmp_path)
    assert not again.stored
    take(buffer, 1, rollouts(1, "a", [1, 0]), rollouts(1, "b", [0.3, 0]), reference=reference)
    buffer.save(tmp_path)
    take(again, 1, rollouts(1, "z", [1, 1]))  # what it holds is forgotten
    again.load(tmp_path)
    assert stored(again) == stored(buffer)
    for one, other in zip(buffer.stored, again.stored, strict=True):
        assert one.version == other.version and one.scores.keys() == other.scores.keys()
        assert len(one.scores) == 1 + reference
        assert all(torch.equal(values, other.scores[name]) for name, values in one.scores.items())
        assert (one.trajectory.rollout_log_probs == other.trajectory.rollout_log_probs).all()
    first, second = (take(b, 2, rollouts(2, "a", [0, 0]), reference=reference) for b in (buffer, again))
    assert ids(first) == ids(second) and first.batch is not None and second.batch is not None
    assert torch.equal(first.batch.old_log_probs, second.batch.old_log_probs)  # type: ignore[arg-type]
