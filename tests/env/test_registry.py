"""Tasks by name, module and path; environment ids."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from sorl_env import Task, ToolUseEnv, UserError, load_task, register_task, task_names
from sorl_env.task.registry import _ENV_IDS

from .conftest import Scripted

SOURCE = """
from sorl_env import Example, Task

def build(name="filed", answer="yes"):
    return Task(
        name=name,
        prompt=lambda example: example.question,
        reward=lambda example, turns: {"right": float(turns[-1].content == answer)},
        parse_row=lambda row: Example(row["id"], row["question"]),
        env_id=f"test/{name.capitalize()}-v0",
        embedded=lambda split: [Example("1", "Yes?")],
    )
"""


@pytest.mark.parametrize(("env_id", "name"), _ENV_IDS.items())
def test_ids_known_without_import_are_those_of_the_tasks(env_id: str, name: str) -> None:
    assert load_task(name).env_id == env_id
    assert load_task(env_id) is load_task(name) and name in task_names()
    assert not [other for other in task_names() if other.startswith("_")]
    assert env_id in gymnasium.registry


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hotpot_qa", r"there is no task 'hotpot_qa'\. Did you mean 'hotpotqa'\?"),
        ("zzz", r"For a task of your own give package\.module:TASK or the path of a \.py file"),
        ("no_such_package.tasks:TASK", "no module 'no_such_package'; is it on the Python path"),
        ("sorl_env.no_such:TASK", r"no module 'sorl_env.no_such'"),
        ("sorl_tasks.nq:TSAK", r"'sorl_tasks\.nq:TSAK': sorl_tasks\.nq has no TSAK\. Did you mean 'TASK'"),
        ("sorl_env.task.registry:register_envs", r"returned a NoneType, not a Task"),
        ("sorl_env.task.registry:ENTRY_POINT_GROUP", "ENTRY_POINT_GROUP is not a Task"),
    ],
)
def test_what_is_no_task_gets_suggestions(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_task(name)


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(f"{SOURCE}\nTASK = build({folder!r})\n", encoding="utf-8")
    assert [load_task(str(tmp_path / folder / "task.py")).name for folder in "abab"] == list("abab")


def test_a_file_with_other_names_for_its_tasks(tmp_path: Path) -> None:
    file = tmp_path / "more.py"
    file.write_text(SOURCE + "\nONE = build('one')\n", encoding="utf-8")
    assert load_task(str(file)).name == "one"
    file.write_text(SOURCE + "\nONE = build('one')\nTWO = build('two')\n", encoding="utf-8")
    assert load_task(f"{file}:TWO").name == "two"
    with pytest.raises(UserError, match=r"has no TASK. Known: ONE, TWO"):
        load_task(str(file))
    with pytest.raises(UserError, match=r"has no TOW. Did you mean 'TWO'"):
        load_task(f"{file}:TOW")
    file.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"has no TASK\. Declare one there: TASK = Task"):
        load_task(str(file))


def test_knobs_reach_a_builder(tmp_path: Path) -> None:
    file = tmp_path / "built.py"
    file.write_text(SOURCE + "\nTASK = build\n", encoding="utf-8")
    assert load_task(str(file)).name == "filed"
    assert load_task(str(file), name="knobbed").name == "knobbed"
    with pytest.raises(UserError, match=r"has no knob 'nmae'\. Did you mean 'name'\?"):
        load_task(str(file), nmae="x")
    file.write_text(SOURCE + "\nfiled = build\nTASK = build()\n", encoding="utf-8")
    assert load_task(str(file), name="again").name == "again"
    with pytest.raises(UserError, match="task 'medqa': it has no knobs, but got hops"):
        load_task("medqa", hops=3)
    file.write_text(
        SOURCE + "\ndef TASK(hops=1):\n    raise ValueError(f'hops={hops} is too many')\n", encoding="utf-8"
    )
    with pytest.raises(UserError, match="hops=9 is too many"):
        load_task(str(file), hops=9)


def test_a_registered_task_keeps_its_tools(make_task: Callable[..., Task]) -> None:
    """Gymnasium copies the arguments it is registered with; a tool with a lock cannot be copied."""

    tool: Any = Scripted("found")
    tool.lock = threading.Lock()
    task = make_task(env_id="test/Locked-v0", tools=[tool])
    register_task(task)
    env = gymnasium.make("test/Locked-v0").unwrapped
    assert isinstance(env, ToolUseEnv) and env.task is task
    renewed = make_task(env_id="test/Locked-v0")
    register_task(renewed)
    assert gymnasium.make("test/Locked-v0").unwrapped.task is renewed  # type: ignore[attr-defined]
    register_task(make_task(env_id="sorl/NQ-v0"))
    assert load_task("sorl/NQ-v0").name == "nq"  # one of the package keeps its task
