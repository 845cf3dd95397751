"""The vector environment: the same episodes as alone, with one batched call a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_env import Task, ToolSettings, ToolUseEnv, ToolUseVectorEnv, UserError, register_task

SEARCH = "<think>a</think><search>{}</search>"
ANSWER = "<think>b</think><answer>gold {}</answer>"
INVALID = "no tags"


@pytest.fixture
def env_id(make_task: Callable[..., Task]) -> str:
    register_task(make_task(env_id="test/Vector-v0"))
    return "test/Vector-v0"


@pytest.mark.parametrize("mode", [None, "vector_entry_point", "sync"])
def test_make_vec(env_id: str, mode: str | None) -> None:
    envs = gymnasium.make_vec(env_id, num_envs=3, vectorization_mode=mode)
    assert isinstance(envs, SyncVectorEnv if mode == "sync" else ToolUseVectorEnv)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    observations, infos = envs.reset(seed=1)
    assert observations in envs.observation_space and len(observations) == 3
    assert infos["index"].dtype == np.int64 and infos["_index"].all()
    actions = envs.action_space.sample()
    assert actions in envs.action_space
    observations, rewards, terminated, truncated, infos = envs.step(actions)
    assert observations in envs.observation_space
    assert [array.shape for array in (rewards, terminated, truncated, infos["turn"])] == [(3,)] * 4
    assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
    assert [parsed.kind for parsed in infos["parsed"]] == ["invalid"] * 3
    envs.close()
    envs.close()


@pytest.mark.parametrize(
    "env_id", ["sorl/NQ-v0", "sorl/HotpotQA-v0", "sorl/AlphaMed19K-v0", "sorl/MiniHop-v0"]
)
def test_the_packaged_ids(env_id: str) -> None:
    envs = gymnasium.make_vec(env_id, num_envs=2)
    assert isinstance(envs, ToolUseVectorEnv)
    envs.reset(seed=0)
    *_, infos = envs.step(["<think>a</think><search>river</search>", INVALID])
    assert [len(calls) for calls in infos["tool_calls"]] == [1, 0]
    envs.close()


def test_the_searches_of_a_step_go_out_as_one_call(task: Task, canned: Any) -> None:
    envs = ToolUseVectorEnv(4, task)
    envs.reset(options={"index": [0, 1, 2, 3]})
    observations, *_ = envs.step([SEARCH.format("x"), INVALID, SEARCH.format("y"), ANSWER.format(3)])
    assert canned.batches == [["x", "y"]]
    assert ["about x" in observations[0], "about y" in observations[2]] == [True, True]
    envs.step([ANSWER.format(0), ANSWER.format(0), SEARCH.format("z"), "ignored: this one resets"])
    assert canned.batches == [["x", "y"], ["z"]]


TURNS = st.sampled_from([SEARCH.format("x"), ANSWER.format(0), ANSWER.format(1), INVALID])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(TURNS, TURNS, TURNS), min_size=1, max_size=8),
    mode=st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]),
)
def test_as_gymnasiums_own_vector_environment(
    make_task_for_fuzzing: Callable[[str], Task], steps: list[tuple[str, str, str]], mode: AutoresetMode
) -> None:
    """With one example there is nothing to draw: observations, rewards, ends and infos are those of SyncVectorEnv."""
    whole = make_task_for_fuzzing("<passage>")
    assert whole.embedded is not None
    first = whole.embedded("train")[:1]
    task = Task(**{**vars(whole), "embedded": lambda split: first})
    ours = ToolUseVectorEnv(3, task, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: ToolUseEnv(task) for _ in range(3)], autoreset_mode=mode)
    assert_same(ours.reset(seed=0), theirs.reset(seed=0))
    for actions in steps:
        assert_same(ours.step(actions), theirs.step(actions))


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal, but for latencies and for what stands where a mask is False."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert type(one) is type(other)
        assert list(one) == list(other)
    assert_same_infos(ours[-1], theirs[-1])


def assert_same_infos(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert {key for key in ours if not key.startswith("_")} == {
        key for key in theirs if not key.startswith("_")
    }
    for key, value in theirs.items():
        if key.startswith("_"):
            assert list(ours[key]) == list(value), key
        elif isinstance(value, dict):
            assert_same_infos(ours[key], value)
        else:
            mask = theirs[f"_{key}"]
            assert ours[key].dtype == value.dtype, key
            assert [comparable(one) for one in ours[key][mask]] == [comparable(one) for one in value[mask]], (
                key
            )


def comparable(value: Any) -> Any:
    return [call.reply for call in value] if isinstance(value, list) else value


def test_same_step_resets_at_once(task: Task) -> None:
    envs = ToolUseVectorEnv(2, task, autoreset_mode="SameStep")
    envs.reset(options={"index": 4})
    observations, rewards, terminated, _, infos = envs.step([SEARCH.format("x"), ANSWER.format(4)])
    assert (list(rewards), list(terminated)) == ([0.0, 1.0], [False, True])
    assert "about x" in observations[0] and observations[1].startswith("Answer with the tags")
    assert list(infos["final_obs"]) == [None, ""] and list(infos["_final_info"]) == [False, True]
    assert infos["final_info"]["reward_items"]["exact_match"][1] == 1.0
    assert infos["final_info"]["stop_reason"][1] == "answer"
    assert list(infos["_parsed"]) == [True, False] and list(infos["_question"]) == [False, True]
    *_, terminated, _, _ = envs.step([ANSWER.format(4), ANSWER.format(envs.envs[1].example.id)])
    assert terminated.all()


def test_seeds(task: Task) -> None:
    def draws(envs: ToolUseVectorEnv, seed: int) -> list[list[int]]:
        rows = [envs.reset(seed=seed)[1]["index"].tolist()]
        for _ in range(10):
            envs.step([ANSWER.format(0)] * 5)
            rows.append(envs.step([""] * 5)[-1]["index"].tolist())
        return rows

    envs = ToolUseVectorEnv(5, task)
    drawn = draws(envs, 3)
    assert drawn == draws(envs, 3) == draws(ToolUseVectorEnv(5, task), 3) != draws(envs, 4)
    assert {index for row in drawn for index in row} == set(range(6))


def test_an_outage_ends_only_its_own_episodes(make_task: Callable[..., Task]) -> None:
    def search(query: str) -> str:
        if query == "out":
            raise ConnectionError("refused")
        return "fine"

    envs = ToolUseVectorEnv(3, make_task(tools=[search]), tool_settings=ToolSettings(retries=0))
    envs.reset(seed=0)
    _, _, terminated, truncated, infos = envs.step([SEARCH.format(query) for query in ("a", "out", "b")])
    assert (list(terminated), list(truncated)) == ([False] * 3, [False, True, False])
    assert list(infos["stop_reason"]) == [None, "error", None]
    assert "refused" in infos["error"][1] and infos["error"][0] is None


def test_what_is_refused(task: Task) -> None:
    with pytest.raises(UserError, match="num_envs must be at least 1, not 0"):
        ToolUseVectorEnv(0, task)
    with pytest.raises(UserError, match="autoreset_mode must be NEXT_STEP or SAME_STEP"):
        ToolUseVectorEnv(2, task, autoreset_mode=AutoresetMode.DISABLED)
    envs = ToolUseVectorEnv(2, task)
    envs.reset()
    with pytest.raises(UserError, match="3 actions for 2 environments"):
        envs.step([INVALID] * 3)
    for options, problem in (
        ({"index": [1, 2, 3]}, "reset: 3 indices for 2 environments"),
        ({"index": [1, 6]}, "index 6 is outside the 6 examples, 0 to 5"),
        ({"indices": [1, 2]}, "reset has no option 'indices'; its only option is 'index'"),
    ):
        with pytest.raises(UserError, match=problem):
            envs.reset(options=options)


def test_render(task: Task) -> None:
    envs = ToolUseVectorEnv(2, task, render_mode="ansi")
    envs.reset(options={"index": [0, 1]})
    shown = envs.render()
    assert shown is not None
    assert ["Question 0?" in shown[0], "Question 1?" in shown[1]] == [True, True]  # type: ignore[operator]
    assert ToolUseVectorEnv(2, task).render() is None
