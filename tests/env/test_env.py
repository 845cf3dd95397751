"""The environment: Gymnasium's contract, the state machine, rewards."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from sorl_env import (
    Example,
    Limits,
    ParsedTurn,
    StopReason,
    Task,
    ToolCall,
    ToolSettings,
    ToolUnavailableError,
    ToolUseEnv,
    UserError,
    register_task,
)
from sorl_env.task.registry import _ENV_IDS

from .conftest import ANSWER, INVALID, SEARCH


def answer(env: ToolUseEnv) -> str:
    return ANSWER.format(env.example.id)


@pytest.mark.parametrize("env_id", [*_ENV_IDS, "test/Toy-v0"])
def test_gymnasiums_checker_has_nothing_to_say(env_id: str, make_task: Callable[..., Task]) -> None:
    register_task(make_task(env_id="test/Toy-v0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(env_id)
        check_env(env.unwrapped)
        env.close()
        env.close()


def test_an_episode(env: ToolUseEnv) -> None:
    prompt, info = env.reset(seed=3)
    number = info["index"]
    assert prompt == f"Answer with the tags <answer>Beijing</answer>. Question {number}?"
    example = {"example_id": str(number), "index": number, "question": f"Question {number}?"}
    examples = {"source": "embedded", "split": "train", "is_sample": False}
    assert info == {**example, **examples, "tools": ("search",)}
    observation, reward, terminated, truncated, info = env.step(SEARCH)
    assert observation == "\n\n<information>\nDoc 1 (Canned): about who\n</information>\n\n"
    assert (reward, terminated, truncated) == (0.0, False, False)
    (call,) = info["tool_calls"]
    assert call._replace(latency_s=0.0) == ToolCall("search", "who", "Doc 1 (Canned): about who", hits=1)
    assert call.latency_s > 0
    nothing = dict.fromkeys(("format_error", "stop_reason", "error"))
    turn = {"parsed": ParsedTurn("tool", "a", "search", "who"), "tool_calls": [call], "turn": 0}
    assert info == {**nothing, **turn, "reward_items": {}, "example_id": str(number)}
    observation, reward, terminated, truncated, info = env.step(answer(env))
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert (info["reward_items"], info["turn"], info["stop_reason"]) == ({"exact_match": 1.0}, 1, "answer")


@pytest.mark.parametrize(
    ("turns", "reason", "reward"),
    [
        ([ANSWER], "answer", 1.0),
        (["<think>b</think><answer>no</answer>"], "answer", 0.0),
        ([SEARCH, SEARCH, ANSWER], "answer", 1.0),
        ([SEARCH, INVALID, ANSWER], "answer", 1.0),
        ([SEARCH, SEARCH, SEARCH], "max_turns", 0.0),
        ([INVALID, INVALID, SEARCH], "max_turns", 0.0),
        ([SEARCH, SEARCH, INVALID], "invalid", 0.0),
        ([INVALID, INVALID, INVALID], "invalid", 0.0),
    ],
)
def test_how_episodes_end(env: ToolUseEnv, canned: Any, turns: list[str], reason: str, reward: float) -> None:
    env.reset(options={"index": 2})
    results = [env.step(turn.format(2)) for turn in turns]
    assert [r.terminated or r.truncated for r in results] == [False] * (len(turns) - 1) + [True]
    last = results[-1]
    assert last.terminated == (reason == "answer") and last.truncated == (reason != "answer")
    assert (last.info["stop_reason"], last.reward, last.observation) == (reason, reward, "")
    assert all(result.observation for result in results[:-1])  # two turns never touch
    # a tool block in the last turn is not executed
    assert canned.queries == ["who"] * turns[:2].count(SEARCH)


def test_steps_out_of_order_raise(env: ToolUseEnv) -> None:
    for call in (lambda: env.step(SEARCH), lambda: env.truncate("aborted")):
        with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
            call()
    env.reset(seed=0)
    with pytest.raises(ResetNeeded, match=r"call step\(\) or begin_turn\(\) first"):
        env.finish_turn([])
    env.begin_turn(SEARCH)
    with pytest.raises(ResetNeeded, match=r"call finish_turn\(\) first"):
        env.begin_turn(SEARCH)
    env.reset(seed=0)
    env.step(ANSWER)
    with pytest.raises(ResetNeeded, match=r"call reset\(\) first"):
        env.step(SEARCH)


def test_seeds(task: Task) -> None:
    def draws(env: ToolUseEnv, seed: int) -> list[int]:
        return [env.reset(seed=seed)[1]["index"], *(env.reset()[1]["index"] for _ in range(30))]

    env = ToolUseEnv(task)
    drawn = draws(env, 7)
    assert drawn == draws(env, 7) == draws(ToolUseEnv(task), 7) == draws(env.spawn(), 7)
    assert drawn != draws(env, 8)
    assert set(drawn) == set(range(6))


def test_an_index_picks_the_example(env: ToolUseEnv) -> None:
    for index in (0, 5):
        assert env.reset(options={"index": index})[1]["index"] == index
        assert env.example.id == str(index)
    for options, problem in (
        ({"index": 6}, "index 6 is outside the 6 examples, 0 to 5"),
        ({"index": -1}, "index -1 is outside"),
        ({"index": "2"}, "index '2' is outside"),
        ({"indx": 2}, "reset has no option 'indx'; its only option is 'index'"),
    ):
        with pytest.raises(UserError, match=problem):
            env.reset(options=options)


def test_a_tool_that_is_out_excludes_the_episode(make_task: Callable[..., Task]) -> None:
    def search(query: str) -> str:
        raise ConnectionError("refused")

    env = ToolUseEnv(make_task(tools=[search]), tool_settings=ToolSettings(retries=0))
    env.reset(seed=0)
    result = env.step(SEARCH)
    assert (result.terminated, result.truncated, result.reward) == (False, True, 0.0)
    assert (result.info["stop_reason"], result.info["reward_items"]) == ("error", {})
    assert result.info["error"] == "tool search is unavailable after 1 try: ConnectionError: refused"
    (call,) = result.info["tool_calls"]
    assert (call.ok, call.attempts) == (False, 1)
    env.reset()
    env.begin_turn(SEARCH)
    assert env.finish_turn([ToolUnavailableError("gone")]).tool_calls == []


def test_a_malformed_request_costs_a_turn_and_says_why(make_task: Callable[..., Task]) -> None:
    def search(query: str, k: int) -> str:
        return query * k

    env = ToolUseEnv(make_task(tools=[search]))
    env.reset(options={"index": 1})
    result = env.step("<think>a</think><search>who</search>")
    assert "The request is not a JSON object" in result.observation
    assert not result.truncated and result.info["format_error"] is None
    assert env.step('<think>a</think><search>{"query": "ab", "k": 2}</search>').observation.count("abab") == 1
    assert env.step(ANSWER.format(1)).reward == 1.0


def test_truncation_from_outside(env: ToolUseEnv) -> None:
    env.reset(seed=0)
    before = env.truncate("aborted")
    assert (before.parsed, before.turn, before.stop_reason) == (None, -1, "aborted")
    env.reset(seed=0)
    step = env.step(SEARCH)
    result = env.truncate(StopReason.MAX_TOKENS)
    assert (result.terminated, result.ended, result.observation, result.reward) == (False, True, "", 0.0)
    assert (result.parsed, result.turn) == (step.info["parsed"], 0)
    assert result.tool_calls == step.info["tool_calls"]
    assert (result.stop_reason, result.reward_items) == ("max_tokens", {"exact_match": 0.0})
    env.reset(seed=0)
    env.begin_turn(SEARCH)
    result = env.truncate("error", error="the reward raised")
    assert (result.error, result.tool_calls, result.reward_items) == ("the reward raised", [], {})
    with pytest.raises(ValueError, match="tired"):
        env.reset(seed=0)
        env.truncate("tired")


def rewards_of_turn(example: Example, turns: Sequence[ParsedTurn]) -> dict[str, float]:
    return {"format": 0.0 if turns[-1].error else 0.1, "exact_match": 0.01}


def test_rewards_of_a_turn(make_task: Callable[..., Task]) -> None:
    env = ToolUseEnv(make_task(turn_reward=rewards_of_turn))
    env.reset(options={"index": 0})
    first, second = env.step(SEARCH), env.step(INVALID)
    assert first.info["reward_items"] == {"format": 0.1, "exact_match": 0.01}
    assert (first.reward, second.reward) == (pytest.approx(0.11), pytest.approx(0.01))
    last = env.step(ANSWER.format(0))
    assert last.info["reward_items"] == {"format": 0.1, "exact_match": 1.01}
    assert last.reward == pytest.approx(1.11)
    # a truncation repeats the rewards of the last turn
    for reason, items in (("max_tokens", {"format": 0.0, "exact_match": 0.01}), ("aborted", {})):
        env.reset(options={"index": 0})
        env.step(INVALID)
        assert env.truncate(reason).reward_items == items


def test_infos_belong_to_their_caller(make_task: Callable[..., Task]) -> None:
    constant = {"score": 1.0}
    env = ToolUseEnv(make_task(reward=lambda example, turns: constant))
    for _ in range(2):
        env.reset(seed=0)
        search = env.step(SEARCH)
        search.info["tool_calls"].clear()
        search.info["reward_items"]["score"] = 9.0
        last = env.step(ANSWER)
        assert last.info["reward_items"] == {"score": 1.0}
        last.info["reward_items"]["score"] = 9.0
    assert constant == {"score": 1.0}


def test_the_settings_reach_the_tools_and_closing_closes_what_was_built_from_them(
    make_task: Callable[..., Task], canned: Any
) -> None:
    seen: list[ToolSettings] = []
    closed: list[str] = []
    canned.close = lambda: closed.append("closed")
    built = make_task(tools=lambda settings: [seen.append(settings), canned][1:])
    ToolUseEnv(built, tool_settings=ToolSettings(corpus="c.jsonl", top_k=5))
    ToolUseEnv(built, tools=[])
    assert seen == [ToolSettings(corpus="c.jsonl", top_k=5)]
    for env in (ToolUseEnv(make_task()), ToolUseEnv(built, tools=[canned]), ToolUseEnv(built).spawn()):
        env.close()
    assert closed == []
    ToolUseEnv(built).close()
    assert closed == ["closed"]


def test_limits_are_checked() -> None:
    wrong = {"max_turns": 0, "max_new_tokens": -1, "max_trajectory_tokens": 1, "max_seconds": 0.0}
    for field, value in {**wrong, "max_reply_chars": 0}.items():
        with pytest.raises(ValueError, match=f"limits.{field} must be .*, not {re.escape(str(value))}"):
            Limits(**{field: value})  # type: ignore[arg-type]


def test_spawned_environments_share_what_is_constant_and_nothing_else(env: ToolUseEnv) -> None:
    env.reset(options={"index": 0})
    env.step(SEARCH)
    other = env.spawn()
    assert (other.toolbox, other.examples, other.task) == (env.toolbox, env.examples, env.task)
    with pytest.raises(ResetNeeded):
        other.step(SEARCH)
    other.reset(options={"index": 1})
    other.step(INVALID)
    other.action_space.seed(1)
    assert env.example.id == "0"
    assert env.step(ANSWER.format(0)).reward == 1.0
    assert other.step(ANSWER.format(1)).info["turn"] == 1
