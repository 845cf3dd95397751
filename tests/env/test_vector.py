"""Gymnasium's own vector environments, in one process and in several, and the space of strings."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import sorl_env
from sorl_env import ToolUseEnv, UnicodeText

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
    embedded=lambda split: [Example(str(n), "?", ("x",), metadata={"length": n}) for n in (0, 1, 70, 60000)],
)
"""


def record(envs: Any) -> list[Any]:
    """All that the environments return, from the reset on."""
    seen: list[Any] = [envs.reset(seed=3)]
    actions = itertools.cycle(ACTIONS)
    for _ in range(7):
        seen.append(envs.step([next(actions) for _ in range(envs.num_envs)]))
        assert seen[-1][0] in envs.observation_space
    envs.close()
    return seen


@pytest.mark.parametrize(
    ("env_id", "context"),
    [("sorl/NQ-v0", None), pytest.param("sorl/Task-v0", "spawn", marks=pytest.mark.slow)],
)
def test_processes_return_what_environments_in_this_one_do(
    env_id: str, context: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the latencies of calls. A process that is spawned shares nothing with this one."""
    monkeypatch.setattr("sorl_env.tool.ToolCall.__repr__", lambda call: f"{call.argument} {call.reply}")
    (tmp_path / "echoes.py").write_text(TASK_FILE)
    settings = {"task": str(tmp_path / "echoes.py")} if env_id == "sorl/Task-v0" else {}
    own = {"shared_memory": False, "context": context}
    here = gymnasium.make_vec(env_id, 2, vectorization_mode="sync", **settings)
    there = gymnasium.make_vec(env_id, 2, vectorization_mode="async", vector_kwargs=own, **settings)
    assert isinstance(here, SyncVectorEnv) and isinstance(there, AsyncVectorEnv)
    for one, other in zip(record(here), record(there), strict=True):
        assert context or str(one[-1]) == str(other[-1])
        assert data_equivalence(one[:-1], other[:-1])


def test_shared_memory_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="shared_memory=False"):
        gymnasium.make_vec("sorl/NQ-v0", num_envs=2, vectorization_mode="async")


def test_a_task_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "echoes.py"
    path.write_text(TASK_FILE)
    env = sorl_env.make(str(path))
    assert isinstance(env.unwrapped, ToolUseEnv) and env.spec is not None and env.spec.id == "sorl/Task-v0"
    assert env.reset(options={"index": 2})[0] == "é" * 70
    again = gymnasium.make(env.spec)  # what is written down about it makes it anew
    assert again.reset(options={"index": 1})[0] == "é"
    with pytest.raises(sorl_env.UserError, match="no such file"):
        sorl_env.make(str(tmp_path / "echos.py"))


@given(st.text())
def test_every_string_is_in_it_and_nothing_else(text: str) -> None:
    assert text in UnicodeText()
    assert not any(value in UnicodeText() for value in (text.encode("utf-8", "replace"), [text], None, 1))


def test_samples_are_seeded_and_copies_draw_the_same() -> None:
    space = UnicodeText(seed=5)
    twins = [copy.deepcopy(space), pickle.loads(pickle.dumps(space))]
    samples = [space.sample() for _ in range(200)]
    assert all([twin.sample() for _ in range(200)] == samples for twin in twins)
    assert len(set(samples)) > 190 and {"<", "/", "漢"} <= set("".join(samples))
    assert isinstance(space, Text) and space == UnicodeText() != Text(64) and repr(space) == "UnicodeText()"
