"""Coin Collector: TextWorld's games as episodes, the expert that finds each coin, and what a hasty one misses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sorl_env import ToolUseEnv, UserError, load_task
from sorl_env.commands.check_task import check_task
from sorl_tasks.coin_collector import coin_collector, expert_turn

pytest.importorskip("textworld", reason="needs pip install -e '.[textworld]'")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def env() -> ToolUseEnv:
    return ToolUseEnv(coin_collector(length=4, games=4))


def play(env: ToolUseEnv, index: int, hasty: bool = False) -> tuple[list[str], float]:
    """The expert's turns in a game, and its reward."""
    env.begin_episode(index)
    turns: list[str] = []
    observations: list[str] = []
    while True:
        turns.append(expert_turn(observations, hasty))
        result = env.step(turns[-1])
        observations.append(result.observation)
        if result.terminated or result.truncated:
            return turns, result.reward


def test_the_expert_finds_every_coin_within_the_limit(env: ToolUseEnv) -> None:
    for index in range(4):
        turns, reward = play(env, index)
        assert reward == 1.0 and 5 <= len(turns) <= env.limits.max_turns


def test_a_hasty_expert_answers_in_the_first_dead_end(env: ToolUseEnv) -> None:
    for index in range(4):
        turns, reward = play(env, index, hasty=True)
        walked = [turn for turn in turns if "<act>" in turn]
        whole = play(env, index)[0]
        assert walked == whole[: len(walked)]  # the same way until it gives up
        assert reward == (turns == whole)


def test_the_room_is_rewarded_and_no_other_answer(env: ToolUseEnv) -> None:
    answer = play(env, 0)[0][-1]
    for text, reward in ((answer, 1.0), ("<think> so </think> <answer> Nowhere </answer>", 0.0)):
        env.begin_episode(0)
        assert env.step(text).reward == reward


@pytest.mark.parametrize("typed", ["quit", "restart", "save", "\0", "é", "go up", "look\nquit", "x" * 500])
def test_other_commands_do_not_reach_the_game(env: ToolUseEnv, typed: str) -> None:
    env.begin_episode(0)
    seen = env.step("<think> a </think> <act> look </act>").observation
    assert (
        "Possible commands: look, go north" in env.step(f"<think> a </think> <act>{typed}</act>").observation
    )
    assert env.step("<think> a </think> <act> LOOK </act>").observation == seen


def test_the_checker_finds_nothing(env: ToolUseEnv) -> None:
    assert [check.name for check in check_task(env) if not check.passed] == []


def test_games_are_kept_and_splits_share_none(env: ToolUseEnv, _cache: Path) -> None:
    play(env, 0)
    kept = {path: path.stat().st_mtime_ns for path in _cache.rglob("4-0.*")}
    assert {path.suffix for path in kept} == {".z8", ".json"}
    play(ToolUseEnv(coin_collector(length=4, games=4)), 0)
    assert kept == {path: path.stat().st_mtime_ns for path in _cache.rglob("4-0.*")}
    assert not list(_cache.rglob("*.ni")) and not list(_cache.rglob("*unfinished*"))
    test = ToolUseEnv(coin_collector(length=4, games=4), split="test")
    assert not {one.id for one in test.examples.examples} & {one.id for one in env.examples.examples}


@pytest.mark.parametrize("knobs", [{"length": 1}, {"length": 51}, {"games": 0}, {"hasty": 1.5}])
def test_knobs_out_of_range_are_refused(knobs: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"coin_collector: {next(iter(knobs))} "):
        load_task("coin_collector", **knobs)
