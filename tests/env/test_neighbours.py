"""Task files that import the files beside them: in this process, in others, and beside other tasks."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gymnasium
import pytest

from sorl_env import UserError, load_task
from sorl_env.commands.command import run_command
from sorl_env.task.import_file import import_file

TASK = """\
import helper
import parts.words as words
from helper import GOLD
from parts.words import shout
from sorl_env import Example, Task


def reward(example, turns):
    import late  # when the reward is computed, and not with the file

    return {"right": late.judge(turns[-1].content, GOLD)}


TASK = Task(
    name="at_" + helper.NAME,
    prompt=lambda example: words.shout(example.question) + shout(helper.NAME),
    reward=reward,
    parse_row=lambda row: Example(row["id"], row["question"]),
    embedded=lambda split: [Example("0", "who?")],
)
"""


HELPER = "from helper import NAME\n"


def folder_of(base: Path, name: str) -> Path:
    folder = base / name
    (folder / "parts").mkdir(parents=True)
    (folder / "shop.py").write_text(TASK)
    (folder / "helper.py").write_text(f"import os\nNAME = {name!r}\nGOLD = 'gold ' + NAME\n")
    (folder / "late.py").write_text(f"{HELPER}def judge(a, b):\n    return float(a == b) + len(NAME)\n")
    (folder / "parts" / "__init__.py").write_text("")
    words = f"{HELPER}from .loud import up\ndef shout(text):\n    return up(text + NAME)\n"
    (folder / "parts" / "words.py").write_text(words)
    (folder / "parts" / "loud.py").write_text("def up(text):\n    return text.upper()\n")
    return folder / "shop.py"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of one test are not there in the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def play(file: str) -> tuple[str, str, float]:
    """The task's name, prompt and reward; other processes run this, too."""
    env = gymnasium.make("sorl/Task-v0", task=file)
    prompt, _ = env.reset()
    task = load_task(file)
    _, reward, *_ = env.step(f"<think>x</think><answer>gold {task.name[3:]}</answer>")
    return task.name, prompt, float(reward)


@pytest.mark.parametrize("method", ["here", "fork", "spawn"])
def test_a_task_imports_its_neighbours(method: str, tmp_path: Path) -> None:
    file = str(folder_of(tmp_path, "a"))
    if method == "here":
        seen = [play(file), play(file)]
    else:
        if method == "fork":
            play(file)  # a forked process has these modules already
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            seen = list(pool.map(play, [file, file]))
    assert seen == [("at_a", "WHO?AAA", 2.0)] * 2


@pytest.mark.parametrize("name", ["helper", "late", "parts"])
def test_a_neighbour_whose_name_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    """Also one that is imported later, and one that a neighbour imports."""
    folder_of(tmp_path, "a")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / f"{name}.py").write_text("")
    (tmp_path / "first" / "task.py").write_text(f"import {name}\n")
    import_file(tmp_path / "first" / "task.py")
    taken = tmp_path / "a" / ("parts/__init__.py" if name == "parts" else f"{name}.py")
    said = f"'import {name}' gives {tmp_path}/first/{name}.py, not {taken}, .* rename the file"
    with pytest.raises(UserError, match=said):
        load_task(str(tmp_path / "a" / "shop.py"))


def test_a_neighbour_hides_no_module_of_others(tmp_path: Path) -> None:
    """A task may be called as a library is; a neighbour that is imported may not."""
    (tmp_path / "json.py").write_text("raise AssertionError('the standard library keeps its names')\n")
    (tmp_path / "sorl_env.py").write_text("raise AssertionError('not this one')\n")
    (tmp_path / "yaml.py").write_text("import json, sorl_env, yaml\nassert yaml.safe_load('2') == 2\n")
    import_file(tmp_path / "yaml.py")
    (tmp_path / "task.py").write_text("import other\n")
    (tmp_path / "other.py").write_text("from yaml import MINE\n")
    with pytest.raises(UserError, match=r"other\.py: 'import yaml' gives .*site-packages.*rename"):
        import_file(tmp_path / "task.py")


def test_what_python_finds_by_itself_is_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "known_to_all.py").write_text("VALUE = object()\n")
    (tmp_path / "task.py").write_text("import known_to_all\nTASK = known_to_all.VALUE\n")
    import known_to_all  # type: ignore[import-not-found]

    assert import_file(tmp_path / "task.py").TASK is known_to_all.VALUE


def test_errors_in_a_neighbour_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder_of(tmp_path, "a")
    (tmp_path / "a" / "late.py").write_text("def judge(a, b):\n    return a / b\n")

    def main(_: list[str]) -> int:
        return play(str(file))[0] == ""

    assert run_command("sorl-x", main, []) == 1
    error = capsys.readouterr().err
    assert "the task's own code failed" in error and 'late.py", line 2, in judge' in error
    (tmp_path / "a" / "helper.py").write_text("NAME = 1 / 0\n")
    for name in ("helper", "parts.words"):
        del sys.modules[name]
    with pytest.raises(UserError, match=r'helper\.py", line 1') as raised:
        load_task(str(file))
    assert "task_file.py" not in str(raised.value) and "importlib" not in str(raised.value)
