"""Tools that keep state, and the time that tools take: what belongs to an episode is its own."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from sorl_env import Limits, Task, ToolUnavailableError, ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutJob, RolloutSettings, SampledTurn, SamplingParams, collect
from sorl_env.trajectory import Trajectory

from .conftest import SEARCH

NOTE = "<think>a</think><note>{}</note>"


class Notebook:
    """Keeps notes, and draws a number for each from the seed of its episode."""

    name = "note"
    description = "Write a note, and see all of them."
    schema: Mapping[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}}

    def __init__(self, seed: int = 0, inline: bool = True, opened: list[Any] | None = None) -> None:
        self.seed = seed
        self.inline = inline
        self.notes: list[str] = []
        self.opened = [] if opened is None else opened  # all notebooks of the task that are not closed
        self.draw = random.Random(seed)

    def __call__(self, text: str) -> str:
        if text == "out":
            raise ToolUnavailableError("gone")
        self.notes.append(f"{text} {self.draw.randrange(1000)}")
        return ", ".join(self.notes)

    def new_episode(self, example: Any, seed: int) -> Notebook:
        made = Notebook(seed, self.inline, self.opened)
        self.opened.append(made)
        return made

    def close(self) -> None:
        self.opened.remove(self)


@pytest.fixture(params=[True, False], ids=["inline", "threads"])
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return Notebook(inline=request.param)


@pytest.fixture
def noting(make_task: Callable[..., Task], canned: Any, notebook: Notebook) -> Task:
    return make_task(tools=[canned, notebook], limits=Limits(max_turns=6))


def turns(draw: random.Random, count: int) -> list[str]:
    written = ["<think>a</think><search>x{}</search>", NOTE, NOTE, NOTE, "nothing {}"]
    return [draw.choice(written).format(number) for number in range(count)]


def test_a_seed_gives_each_episode_tools_with_seeds_of_their_own(noting: Task) -> None:
    env = ToolUseEnv(noting)

    def drawn() -> list[int]:
        seeds = []
        for seed in (5, None, None, None):
            env.reset(seed=seed)
            seeds.append(env.toolbox.tools[1].seed)  # type: ignore[attr-defined]
        return seeds

    first = drawn()
    assert len(set(first)) == 4 and drawn() == first


class Scripted:
    """A sampler whose sessions write fixed turns (texts or token ids) at random moments; it keeps its requests."""

    def __init__(self, scripts: Mapping[str, Sequence[Any]]) -> None:
        self.scripts = scripts
        self.at: dict[str, int] = {}
        self.draw = random.Random(3)
        self.contexts: list[list[int]] = []
        self.params: list[SamplingParams] = []

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        self.contexts.append(list(token_ids))
        self.params.append(params)
        await asyncio.sleep(self.draw.random() * 0.004)
        at = self.at[session] = self.at.get(session, -1) + 1
        ids = [ord(c) if isinstance(c, str) else c for c in self.scripts[session][at]]
        cut = len(ids) >= params.max_new_tokens
        return SampledTurn(ids, [0.0] * len(ids), "length" if cut else "stop")

    def release(self, session: str) -> None:
        self.at.pop(session, None)


class Characters:
    """A tokenizer: a character a token."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False, **more: Any) -> list[int]:
        return [ord(c) for c in text]

    def __call__(self, text: str, **more: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def roll_out(
    env: ToolUseEnv, scripts: Mapping[str, Sequence[str]], sampler: Scripted | None = None
) -> list[Trajectory]:
    """A trajectory for each script, whose name is the number of its example and its seed."""
    jobs = [RolloutJob(name, name, int(name) % 6, seed=int(name)) for name in scripts]
    settings = RolloutSettings(use_chat_template=False)
    return asyncio.run(collect(env, Characters(), sampler or Scripted(scripts), jobs, settings))


def test_rollouts_in_flight_together_do_not_meet(noting: Task, notebook: Notebook) -> None:
    limits = Limits(max_turns=6, max_trajectory_tokens=100_000, max_observation_tokens=5000)
    root, draw = ToolUseEnv(noting, limits=limits), random.Random(4)
    scripts = {str(number): [*turns(draw, 5), "<think>b</think><answer>x</answer>"] for number in range(12)}
    for (name, script), trajectory in zip(scripts.items(), roll_out(root, scripts), strict=True):
        (single,) = roll_out(root, {name: script})
        assert [turn.observation for turn in single.turns] == [turn.observation for turn in trajectory.turns]
    assert notebook.notes == [] and notebook.opened == []


def test_a_rollout_that_is_given_up_closes_its_tools(noting: Task, notebook: Notebook) -> None:
    class Failing(Scripted):
        async def generate(self, *args: Any) -> SampledTurn:
            assert notebook.opened
            raise KeyError("no such session")

    with pytest.raises(KeyError):
        roll_out(ToolUseEnv(noting), {"0": []}, Failing({}))
    assert notebook.opened == []


def test_an_outage_and_the_end_of_an_episode_close_its_tools(noting: Task, notebook: Notebook) -> None:
    env = ToolUseEnv(noting)
    env.toolbox.retries = 0
    for last in (NOTE.format("out"), "<think>b</think><answer>x</answer>"):
        env.reset(seed=0)
        assert len(notebook.opened) == 1 and env.toolbox.tools[1] is notebook.opened[0]
        result = env.step(last)
        assert (result.terminated or result.truncated) and notebook.opened == []
        assert env.toolbox.tools[1] is notebook


def test_what_is_no_stateful_tool(make_task: Callable[..., Task]) -> None:
    class Same(Notebook):
        def new_episode(self, example: Any, seed: int) -> Notebook:
            return self

    with pytest.raises(UserError, match="new_episode must return another tool of that name"):
        ToolUseEnv(make_task(tools=[Same()])).reset(seed=0)


def test_a_tool_that_cannot_begin_an_episode_ends_that_episode_alone(
    make_task: Callable[..., Task], notebook: Notebook
) -> None:
    class Full(Notebook):
        name = "full"

        def new_episode(self, example: Any, seed: int) -> Notebook:
            if example.id.endswith("1"):
                raise ConnectionError("the sandbox is full")
            made = Full(seed, opened=self.opened)
            self.opened.append(made)
            return made

    env = ToolUseEnv(make_task(tools=[notebook, Full(opened=notebook.opened)]))
    ids = [example.id for example in env.examples.examples]
    broken = next(at for at, name in enumerate(ids) if name.endswith("1"))
    other = (broken + 1) % 6
    answer = ["<think>b</think><answer>x</answer>"]
    first, second = roll_out(env, {str(broken): answer, str(other): answer})
    assert first.excluded and not first.turns
    assert first.error == "tool full cannot begin an episode: ConnectionError: the sandbox is full"
    assert second.stop_reason == "answer" and notebook.opened == []


# --- the time that tools take -------------------------------------------------------------------------------------
@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    held = [100.0]
    monkeypatch.setattr("sorl_env.envs.step.time.monotonic", lambda: held[0])
    return held


@pytest.mark.parametrize(
    ("policy_s", "tool_s", "turn", "reason"),
    [
        (1.0, 0.0, 9, "max_seconds"),  # ten turns of a second: the policy's own
        (1.0, 3.0, 2, "error"),  # 12 s, of which 9 are the tool's
        (0.0, 10.0, 0, "error"),
        (9.99, 0.02, 0, "error"),  # without the tool it would have been in time
        (10.0, 100.0, 0, "max_seconds"),  # late in any case
        (4.0, 0.9, 2, "max_seconds"),
    ],
)
def test_slow_tools_are_an_outage_and_a_slow_policy_is_not(
    make_task: Callable[..., Task], now: list[float], policy_s: float, tool_s: float, turn: int, reason: str
) -> None:
    def search(query: str) -> str:
        now[0] += tool_s
        return "found"

    search.inline = True  # type: ignore[attr-defined]
    task = make_task(tools=[search], turn_reward=lambda example, turns: {"tool": 0.5})
    env = ToolUseEnv(task, limits=Limits(max_turns=50, max_seconds=10.0))
    env.reset(seed=0)
    for number in range(turn + 1):
        now[0] += policy_s
        result = env.step(SEARCH)
        assert result.truncated == (number == turn)
    assert result.info["stop_reason"] == reason
    assert result.reward == (0.0 if reason == "error" else 0.5)
    if reason == "error":
        assert re.search(r"limits.max_seconds=10\).* waiting for tools took", result.info["error"])


def test_an_answer_counts_however_late(make_task: Callable[..., Task], now: list[float]) -> None:
    env = ToolUseEnv(make_task(), limits=Limits(max_seconds=5.0))
    env.reset(seed=0)
    now[0] += 60
    assert env.step("<think>b</think><answer>x</answer>").info["stop_reason"] == "answer"
