"""``gym:ID``: Gymnasium's environments as tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_env import ToolUnavailableError, ToolUseEnv, UserError, load_task, open_env
from sorl_env.commands.check_task import main as check_main
from sorl_env.commands.play import main as play_main
from sorl_env.envs.step import TurnInfo
from tests.env import text_gyms

WRAPPERS = Path(text_gyms.__file__)
LAKE: dict[str, Any] = {"wrapper": f"{WRAPPERS}:LakeInWords", "kwargs": {"is_slippery": False}}
TO_THE_GOAL = ("down", "down", "right", "right", "down", "right")


def play(task: Any, turns: Sequence[str], index: int = 0) -> tuple[str, list[TurnInfo]]:
    env = open_env(task)

    async def main() -> tuple[str, list[TurnInfo]]:
        prompt = await env.areset(index, 7)
        return prompt, [await env.astep(turn) for turn in turns]

    try:
        return asyncio.run(main())
    finally:
        env.close()


def act(*actions: str) -> list[str]:
    return [f"<think>so</think> <action> {action} </action>" for action in actions]


def test_an_episode_on_the_frozen_lake() -> None:
    prompt, results = play(load_task("gym:FrozenLake-v1", **LAKE), act(*TO_THE_GOAL))
    assert prompt.endswith("You stand on field 0 of a frozen lake. Go to field 15: left, down, right or up.")
    assert "<action>" in prompt
    assert results[0].observation == "\n\n<information>\nField 4.\n</information>\n\n"
    assert [r.reward for r in results] == [0, 0, 0, 0, 0, 1]
    last = results[-1]
    assert last.terminated and last.observation == ""
    assert last.reward_items == {"environment": 1.0} and last.stop_reason == "answer"
    assert last.parsed.content == "right" and last.turn == 5


def test_a_turn_of_another_form_is_not_an_action() -> None:
    turns = ["left", "<action>left</action> and then", "<answer>left</answer>"]
    turns += act("LEFT!", "nowhere", "down")
    _, results = play(load_task("gym:FrozenLake-v1", **LAKE), turns)
    errors = ["missing_action", "trailing_text", "missing_action", None, None, None]
    assert [r.format_error for r in results] == errors
    assert all("between <action> and </action>" in r.observation for r in results[:3])
    assert "must be in Text" in results[3].observation  # outside the space: the environment never sees it
    assert "That is no direction." in results[4].observation
    assert "Field 4." in results[5].observation  # none of the others has moved
    task = load_task("gym:FrozenLake-v1", **LAKE, max_turns=2)
    assert play(task, act("left", "left"))[1][-1].stop_reason == "max_turns"
    assert play(task, [*act("left"), "?"])[1][-1].stop_reason == "invalid"


def test_our_own_environment_through_gymnasium_is_itself() -> None:
    one: Any = open_env(load_task("gym:sorl/MiniHop-v0", format="raw", stop="</search>"))
    assert one.stop == ("</search>",)
    task = load_task("gym:sorl/MiniHop-v0", format="raw", stop=["</search>", "</answer>"])
    turn = "<think>a</think><search>headquarters</search>"
    prompt, (result,) = play(task, [turn])
    native = ToolUseEnv("minihop")
    assert prompt == native.reset(seed=0)[0]
    assert result.observation == native.step(turn).observation


def test_splits_share_no_episode() -> None:
    task = load_task("gym:FrozenLake-v1", **LAKE, examples=3)
    assert task.embedded is not None
    ids = [one.id for split in ("train", "validation", "test") for one in task.embedded(split)]
    assert len(ids) == len(set(ids)) == 9
    with pytest.raises(UserError, match=r"no split 'tset'\. Did you mean 'test'"):
        open_env(task, split="tset")
    with pytest.raises(UserError, match=r"leave data=x\.jsonl out"):
        open_env(task, data="x.jsonl")
    with pytest.raises(UserError, match="open_env"):
        ToolUseEnv(task)


@pytest.mark.parametrize(
    ("reference", "knobs", "message"),
    [
        ("gym:CartPole-v1", {}, "its observation space is Box.* action space is Discrete.*task_args.wrapper"),
        ("gym:FrozenLake-v1", {"wrapper": f"{WRAPPERS}:half_wrapped"}, "action space is Discrete.*a wrapper"),
        ("gym:FrozenLake-v1", {"wrapper": f"{WRAPPERS}:LakeInWord"}, "Did you mean 'LakeInWords'"),
        ("gym:FrozenLake-v1", {"wrapper": "LakeInWords"}, "write file.py:Name"),
        ("gym:FrozenLake-v1", {"wrapper": "no.such:Thing"}, "no module 'no'"),
        ("gym:FrozenLake-v1", {"wrapper": f"{WRAPPERS}:repr"}, "no repr there|returned a str"),
        ("gym:FrozenLake-v1", {**LAKE, "kwargs": {"map": 3}}, "task_args.kwargs.*map"),
        (
            "gym:FrozenLake-v1",
            {**LAKE, "kwargs": {"map_name": "9x9"}},
            "KeyError: '9x9'.*correct task_args.kwargs",
        ),
        ("gym:FrozenLake-v1", {**LAKE, "format": "xml"}, "format must be action or raw"),
        ("gym:FrozenLake-v1", {**LAKE, "examples": 0}, "examples must lie between 1"),
        ("gym:FrozenLake-v1", {**LAKE, "timeout_s": float("nan")}, "timeout_s must be above 0"),
        ("gym:Frozn-v9", {}, "registered id"),
        ("gym:no_such_package:X-v0", {}, "No module named 'no_such_package'"),
    ],
)
def test_what_cannot_be_played_is_refused(reference: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task(reference, **knobs)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("hang", "took more than 0.2 s"),
        ("raise", "step raised KeyError: 'inside'"),
        ("bytes", "observation of type bytes"),
        ("nan", "a reward of nan"),
        ("word", "step raised ValueError: could not convert string to float: 'much'"),
    ],
)
def test_a_broken_environment_is_an_outage(action: str, message: str) -> None:
    task = load_task("gym:sorl_tests/Misbehaving-v0", timeout_s=0.2)
    _, (result,) = play(task, act(action))
    assert result.ended and result.stop_reason == "error" and result.reward == 0
    assert message in result.error
    with pytest.raises(ToolUnavailableError, match="reset raised OSError: no level"):
        play(load_task("gym:sorl_tests/Misbehaving-v0"), [], index=1)


def test_ends_and_hostile_text() -> None:
    task = load_task("gym:sorl_tests/Misbehaving-v0")
    for action, reason in (("end", "answer"), ("cut", "max_turns")):
        (result,) = play(task, act(action))[1]
        assert (result.reward, result.stop_reason) == (1.5, reason)
    observation = play(task, act("tags"))[1][0].observation
    assert observation.count("</information>") == 1 and "<answer>" not in observation
    observation.encode()


def test_the_commands_take_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["gym:FrozenLake-v1", "--task_args.wrapper", LAKE["wrapper"]]
    arguments += ["--task_args.kwargs", '{"is_slippery": false}']
    assert check_main([*arguments, "--limit", "3"]) == 0
    lines = iter(TO_THE_GOAL)
    monkeypatch.setattr("sorl_env.commands.play._read", lambda prompt: next(lines))
    assert play_main([*arguments, "--index", "2"]) == 0
    assert "Reward 1 (environment 1); ended by answer after 6 turns." in capsys.readouterr().out
