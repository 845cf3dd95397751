"""Advantages of a whole batch: which state a turn started in, and what each setting makes of the same trajectories."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.advantages import estimate_advantages, state_metrics
from sorl_train.learner.batch import Batch, collate, state_keys

from .test_batch import trajectory

# prompt 1 2, replies 8 and 9; turns of one or two tokens
A = ([1, 2, 30, 31, 8, 40, 9, 50], [-1, -1, 0, 0, -1, 1, -1, 2], [0.2, 0.0, 1.0])
B = ([1, 2, 33, 8, 41, 8, 50], [-1, -1, 0, -1, 1, -1, 2], [0.2, 0.0, 0.0])
C = ([1, 2, 34, 35], [-1, -1, 0, 0], [0.0])
OUT = ([1, 2, 36, 8, 42], [-1, -1, 0, -1, 1], [9.0, 9.0])


def made() -> list[Trajectory]:
    named = [trajectory(name, *parts, group_id="g") for name, parts in (("a", A), ("b", B), ("c", C))]
    other = [trajectory(name, *parts, group_id="h") for name, parts in (("d", A), ("e", C))]
    return [*named, trajectory("out", *OUT, group_id="g", stop_reason=StopReason.ERROR), *other]


def settings(algo: str, **overrides: Any) -> TrainConfig:
    group = 2 if ALGORITHMS[algo].needs_groups else 1
    dotted = {f"loss.{name}": value for name, value in overrides.items()}
    return load_config("minihop", {"algo": algo, "rollout.group_size": group, **dotted})


def scored(trajectories: list[Trajectory], algo: str, **overrides: Any) -> Batch:
    config = settings(algo, **overrides)
    batch = collate(trajectories, anchor_state=config.anchor_state)
    batch = batch.with_fields(values=torch.zeros(batch.action_mask.shape))
    return estimate_advantages(batch, config.algorithm.advantage, config.loss)


def by_turn(batch: Batch, name: str) -> list[float]:
    """The advantage of each turn, which all its tokens have."""
    row = batch.ids.index(name)
    assert batch.advantages is not None
    turns, advantages = batch.turn_ids[row], batch.advantages[row]
    assert not advantages[turns < 0].any()
    values = [advantages[turns == k] for k in range(int(turns.max()) + 1)]
    assert all(bool((value == value[0]).all()) for value in values)
    return [float(value[0]) for value in values]


def test_a_state_is_what_the_environment_said() -> None:
    a, b, *_ = made()
    observed, told = state_keys(b, "observation"), state_keys(b, "history")
    assert observed[1] == observed[2] != observed[0]  # the reply 8 came twice
    assert len(set(told)) == 3
    assert state_keys(a, "observation")[:2] == observed[:2] and state_keys(a, "history")[:2] == told[:2]
    assert state_keys(a, "observation")[2] not in observed  # the reply 9


def test_states_of_a_batch_are_numbered_by_group() -> None:
    batch = collate(made(), anchor_state="observation")
    assert batch.state_ids is not None
    assert batch.state_ids[:3].tolist() == [
        [-1, 0, 0, -1, 1, -1, 2],
        [-1, 0, -1, 1, -1, 1, -1],
        [-1, 0, 0, -1, -1, -1, -1],
    ]
    assert int(batch.state_ids[4].max()) > 2 and batch.state_ids[4, 1] == batch.state_ids[5, 1]
    assert collate(made()).state_ids is None and settings("grpo").anchor_state is None
    assert batch.rows([2]).state_ids.tolist() == [[-1, 0, 0]]  # type: ignore[union-attr]


def test_rloo_by_hand() -> None:
    batch = scored(
        made(), "rloo"
    )  # totals 1.2, .2 and 0, without the excluded one; in the other group 1.2 and 0
    assert by_turn(batch, "a") == pytest.approx([1.1] * 3)
    assert by_turn(batch, "b") == pytest.approx([0.2 - 0.6] * 3)
    assert by_turn(batch, "c") == pytest.approx([-0.7])
    assert by_turn(batch, "out") == [0, 0]
    assert by_turn(batch, "d") == pytest.approx([1.2] * 3)
    assert not batch.returns.any()  # type: ignore[union-attr]


def test_mt_grpo_by_hand() -> None:
    """Outcomes 1, 0, 0; the first turn of a earned .2 and that of b nothing, c has no turn but its last."""
    trajectories = made()
    trajectories[1] = trajectory("b", B[0], B[1], [0.0, 0.0, 0.0], group_id="g")
    batch = scored(trajectories, "mt_grpo", group_std=False, turn_weight=2.0)
    assert by_turn(batch, "a") == pytest.approx([2 / 3 + 0.2, 2 / 3, 2 / 3])
    assert by_turn(batch, "b") == pytest.approx([-1 / 3 - 0.2, -1 / 3, -1 / 3])
    assert by_turn(batch, "c") == pytest.approx([-1 / 3])


def test_groups_turn_by_turn_by_hand() -> None:
    """Returns of the first turns 1.2, .2, 0, of the second 1 and 0, of the third 1 and 0; d is a group of its own."""
    batch = scored(made(), "rloo", group_level="turn")
    assert by_turn(batch, "a") == pytest.approx([1.2 - 0.1, 1.0, 1.0])
    assert by_turn(batch, "b") == pytest.approx([0.2 - 0.6, -1.0, -1.0])
    assert by_turn(batch, "c") == pytest.approx([-0.7])


def test_gigpo_by_hand() -> None:
    batch = scored(made(), "gigpo", group_std=False, gamma=0.5)
    episode = [1.2 - 1.4 / 3, 0.2 - 1.4 / 3, 0 - 1.4 / 3]
    first = [0.2 + 0.25, 0.2, 0.0]  # returns of the first turns
    start = sum(first) / 3
    second = 0.5 / 3  # after the reply 8: .5 in a; 0 twice in b
    assert by_turn(batch, "a") == pytest.approx(
        [episode[0] + first[0] - start, episode[0] + 0.5 - second, episode[0]]
    )
    assert by_turn(batch, "b") == pytest.approx([episode[1] + first[1] - start] + [episode[1] - second] * 2)
    assert by_turn(batch, "c") == pytest.approx([episode[2] - start])
    # with the whole history as state, the third turns are alone
    batch = scored(made(), "gigpo", group_std=False, gamma=0.5, anchor_state="history")
    assert by_turn(batch, "b")[1:] == pytest.approx([episode[1] - 0.25, episode[1]])
    # of the 11 turns that count, all but the last one of a share their state with another one, and d's last two
    shared = state_metrics(scored(made(), "gigpo"))["loss/shared_state_frac"]
    assert shared == pytest.approx(8 / 11)


def test_gae_over_turns_by_hand() -> None:
    batch = scored(made(), "ppo", gae_level="turn", gamma=0.5)
    assert by_turn(batch, "a") == pytest.approx([0.2 + 0.25, 0.5, 1.0])
    assert torch.equal(batch.advantages, batch.returns)  # type: ignore[arg-type]
    tokens = scored(made(), "ppo", gamma=0.5)  # a discount for each token
    assert tokens.advantages[0, 1] == pytest.approx(0.5 * (0.2 + 0.25))  # type: ignore[index]


EVERY_WAY = [
    ("rloo", {}),
    ("rloo", {"group_level": "turn"}),
    ("mt_grpo", {}),
    ("mt_grpo", {"group_baseline": "leave_one_out", "group_std": False, "ratio": "turn"}),
    ("gigpo", {}),
    ("gigpo", {"anchor_state": "history"}),
    ("so_ppo", {"gae_level": "turn", "whiten_advantages": True}),
]


@pytest.mark.parametrize(("algo", "overrides"), EVERY_WAY)
def test_the_order_of_the_trajectories_does_not_matter(algo: str, overrides: dict[str, Any]) -> None:
    order = [4, 0, 3, 2, 5, 1]
    one, other = (scored([made()[i] for i in o], algo, **overrides) for o in (range(6), order))
    for row, i in enumerate(order):
        torch.testing.assert_close(other.advantages[row], one.advantages[i])  # type: ignore[index]


def test_the_kl_in_the_reward_counts_for_the_turn_of_its_token() -> None:
    config = settings("gigpo", kl_coef=0.1, kl_in="reward", kl_type="k1", group_std=False, gamma=1.0)
    batch = collate(made()[:2], anchor_state="observation")
    gap = torch.zeros(batch.action_mask.shape)
    gap[0, 4] = 1.0  # the second turn of a is away from the reference
    batch = batch.with_fields(old_log_probs=gap, ref_log_probs=torch.zeros_like(gap))
    found = estimate_advantages(batch, "state_group", config.loss)
    # totals 1.1 and .2; from the reply 8 on .9, and 0 twice; the last turns of a and b are alone and after the reply 8
    assert by_turn(found, "a") == pytest.approx([0.45 + 0.45, 0.45 + 0.6, 0.45])
    assert by_turn(found, "b") == pytest.approx([-0.45 - 0.45, -0.45 - 0.3, -0.45 - 0.3])
