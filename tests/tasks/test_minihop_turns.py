"""MiniHop's rewards of turns: what they pay, and that no way of searching collects more than a correct episode."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from sorl_env import Example, ToolUseEnv, UserError
from sorl_env.commands.check_task import check_task
from sorl_tasks.minihop import TASK, minihop

KNOBS: dict[str, Any] = {"entities": 400, "lookalikes": 6.0, "test_share": 0.3, "hops": (3,)}
KNOBS |= {"train_questions": 30, "test_questions": 30, "hit_reward": 0.6, "valid_reward": 0.3}
INVALID = "<search> no thought </search>"


@pytest.fixture(scope="module")
def env() -> ToolUseEnv:
    return ToolUseEnv(minihop(**KNOBS))


def search(query: str) -> str:
    return f"<think> next </think> <search> {query} </search>"


def answer(text: str) -> str:
    return f"<think> so </think> <answer> {text} </answer>"


def play(env: ToolUseEnv, turns: Sequence[str], index: int = 0) -> tuple[list[float], float]:
    """The reward of each turn, and their sum."""
    env.begin_episode(index)
    rewards = []
    for turn in turns:
        result = env.step(turn)
        rewards.append(result.reward)
        if result.terminated or result.truncated:
            break
    return rewards, sum(rewards)


def path(env: ToolUseEnv, index: int = 0) -> tuple[str, str, str, str]:
    """The names of a question of three hops; the last one is the answer."""
    example: Example = env.examples.examples[index]
    first, second, third, last = example.metadata["names"]
    return first, second, third, last


def test_a_successful_search_that_is_repeated_does_not_collect_again(env: ToolUseEnv) -> None:
    first, second, *_ = path(env)
    again = search(f"  {first.upper()} . ")  # the same to the index, in other letters
    rewards, _ = play(env, [search(first), search(first), again, search(second), search(first)])
    assert rewards == pytest.approx([0.3, 0, 0, 0.3, 0])


def test_a_search_without_use_is_no_hit(env: ToolUseEnv) -> None:
    first, second, third, _ = path(env)
    other = path(env, 1)[0]
    # someone off the path; a later name before its turn; several names at once; a name with more around it
    for useless in (other, second, third, f"{first} {second} {third}", f"mother of {first}"):
        env.begin_episode(0)
        items = env.step(search(useless)).info["reward_items"]
        assert items == pytest.approx({"search_hit": 0.0, "search_valid": 0.1})


def test_well_formed_searches_pay_as_often_as_there_are_hops(env: ToolUseEnv) -> None:
    others = [path(env, index)[0] for index in range(1, 6)]
    rewards, total = play(env, [search(name) for name in others])
    assert rewards == pytest.approx([0.1, 0.1, 0.1, 0, 0]) and total == pytest.approx(0.3)


def test_an_invalid_turn_earns_nothing_and_costs_nothing(env: ToolUseEnv) -> None:
    first, second, third, last = path(env)
    rewards, total = play(env, [INVALID, search(first), search(second), search(third), answer(last)])
    assert rewards == pytest.approx([0, 0.3, 0.3, 0.3, 1.0]) and total == pytest.approx(1.9)
    assert play(env, [INVALID] * 5)[1] == 0


def test_answers_are_paid_as_without_rewards_of_turns(env: ToolUseEnv) -> None:
    first, *_, last = path(env)
    assert play(env, [answer(last)])[1] == 1.0
    assert play(env, [answer(first)])[1] == 0.0
    assert [check for check in check_task(env) if not check.passed] == []


def test_no_episode_collects_more_than_a_correct_one(env: ToolUseEnv) -> None:
    """All episodes of up to four turns out of nine, and longer ones at random."""
    first, second, third, last = path(env)
    other = path(env, 1)[0]
    moves = [
        *map(search, (first, second, third, other, f"{first} {second}")),
        INVALID,
        answer(last),
        answer(first),
    ]
    episodes = [list(turns) for n in (1, 2, 3, 4) for turns in itertools.product(moves, repeat=n)]
    draw = random.Random(0)
    episodes += [[*draw.choices(moves[:6], k=4), draw.choice(moves)] for _ in range(1000)]
    best = 0.0
    for turns in episodes:
        rewards, total = play(env, turns)
        right = turns[len(rewards) - 1] == answer(last)
        assert min(rewards) >= 0 and (total >= 1) is right, turns
        best = max(best, total)
    assert best == pytest.approx(1.9)


def test_turns_earn_nothing_unless_asked() -> None:
    assert TASK.turn_reward is None and minihop(hit_reward=0.1).turn_reward is not None


@pytest.mark.parametrize("knobs", [{"hit_reward": -0.1}, {"hit_reward": 0.9, "valid_reward": 0.1}])
def test_rewards_out_of_range(knobs: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"give none below 0, and at most 0\.99 together"):
        minihop(**knobs)
