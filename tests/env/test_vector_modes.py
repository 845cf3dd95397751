"""Gymnasium's three ways to run many environments, for every id and for tasks that have none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

import sorl_env
from sorl_env import SharedTexts, ToolUseEnv, ToolUseVectorEnv, UnicodeText
from sorl_env.registry import _ENV_IDS
from sorl_env.shared_text import MAX_TEXT_BYTES

ACTIONS = [
    "<think>a</think><search>river</search>",
    "no tags",
    "<think>b</think><answer>Über 漢 gold</answer>",
    "<think>a</think><search>who?</search>",
    "<think>b</think><answer></answer>",
]
TASK_FILE = """
from sorl_env import Example, Task, ToolReply

def echo(text: str) -> str:
    "Repeat."
    return text * 3

TASK = Task(
    name="echoes",
    prompt=lambda example: "é" * example.metadata["length"],
    reward=lambda example, turns: {"done": 1.0},
    parse_row=lambda row: Example(row["id"], "?"),
    tools=[echo],
    embedded=lambda split: [Example(str(n), "?", ("x",), metadata={"length": n}) for n in (0, 1, 70, 5000, 60000)],
)
"""


def record(envs: Any, steps: int = 7) -> list[Any]:
    """All that the environments return, from the reset on."""
    seen: list[Any] = [envs.reset(seed=3)]
    actions = itertools.cycle(ACTIONS)
    for _ in range(steps):
        seen.append(envs.step([next(actions) for _ in range(envs.num_envs)]))
        assert seen[-1][0] in envs.observation_space
    envs.close()
    return seen


def compare_modes(env_id: str, **settings: Any) -> None:
    """Asynchronous processes return what environments in this process return, in Gymnasium's own comparison."""
    in_process = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode="sync", **settings)
    assert isinstance(in_process, SyncVectorEnv)
    expected = record(in_process)
    for vector_kwargs in ({}, {"shared_memory": False}):
        envs = gymnasium.make_vec(
            env_id, num_envs=2, vectorization_mode="async", vector_kwargs=vector_kwargs, **settings
        )
        assert isinstance(envs, AsyncVectorEnv)
        for one, other in zip(record(envs), expected, strict=True):
            assert str(one[-1]) == str(other[-1])  # latencies are not in the info of these tools' calls
            assert data_equivalence(one[:-1], other[:-1])
    batched = gymnasium.make_vec(env_id, num_envs=2, **settings)
    assert isinstance(batched, ToolUseVectorEnv)
    record(batched)


def without_latency(call: Any) -> str:
    return f"{call.tool} {call.argument} {call.reply} {call.ok}"


@pytest.fixture(autouse=True)
def _latency_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's latency differs from run to run; everything else must not."""
    monkeypatch.setattr("sorl_env.tool.ToolCall.__repr__", without_latency)


def test_a_packaged_id_in_every_mode() -> None:
    compare_modes("sorl/NQ-v0")


@pytest.mark.slow
@pytest.mark.parametrize("env_id", _ENV_IDS)
def test_every_packaged_id_in_every_mode(env_id: str) -> None:
    compare_modes(env_id)
    check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.slow
def test_processes_that_share_nothing_with_this_one(tmp_path: Path) -> None:
    (tmp_path / "echoes.py").write_text(TASK_FILE)
    settings = {"task": str(tmp_path / "echoes.py")}
    expected = record(gymnasium.make_vec("sorl/Task-v0", num_envs=2, vectorization_mode="sync", **settings))
    envs = gymnasium.make_vec(
        "sorl/Task-v0", num_envs=2, vectorization_mode="async", vector_kwargs={"context": "spawn"}, **settings
    )
    for one, other in zip(record(envs), expected, strict=True):
        assert data_equivalence(one[:-1], other[:-1])
    compare_modes("sorl/Task-v0", **settings)


def test_a_task_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "echoes.py"
    path.write_text(TASK_FILE)
    env = sorl_env.make(str(path), render_mode="ansi")
    assert isinstance(env.unwrapped, ToolUseEnv) and env.spec is not None and env.spec.id == "sorl/Task-v0"
    assert env.reset(options={"index": 2})[0] == "é" * 70
    again = gymnasium.make(env.spec)  # what is written down about it makes it anew
    assert again.reset(options={"index": 1})[0] == "é"
    envs = gymnasium.make_vec("sorl/Task-v0", num_envs=2, task=str(path))
    assert envs.reset(options={"index": [0, 2]})[0] == ("", "é" * 70)
    with pytest.raises(sorl_env.UserError, match="no such file"):
        sorl_env.make(str(tmp_path / "echos.py"))


def test_shared_memory_holds_any_text() -> None:
    space, texts = UnicodeText(), ["", "a", "日本語 \0 \n", "half \ud800", "x" * MAX_TEXT_BYTES]
    memory = create_shared_memory(space, n=len(texts))
    view = read_from_shared_memory(space, memory, n=len(texts))
    assert isinstance(view, SharedTexts) and list(view) == [""] * len(texts)
    for round_number in range(2):
        for index, text in enumerate(texts):
            write_to_shared_memory(space, index, text[round_number:], memory)
        expected = [text[round_number:].replace("\ud800", "\ufffd") for text in texts]
        assert list(view) == expected and view[1:3] == tuple(expected[1:3]) and view[-1] == expected[-1]
    with pytest.raises(ValueError, match="shared_memory': False"):
        write_to_shared_memory(space, 0, "é" * MAX_TEXT_BYTES, memory)
