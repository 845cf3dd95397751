"""What a user can edit between a start and a resume: a task's files, demonstrations, scripts of MCP servers."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_env.task.import_file import own_code
from sorl_env.task.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.rollout.environments import record_sources, source_facts
from sorl_train.sft.cold_start import start_folder

from .conftest import WORLD, short_config, train_short

TASK = f"""
import dataclasses
from scale import scaled
from sorl_env.task.registry import load_task
BASE = load_task("minihop", **{WORLD})
def reward(example, turns):
    return {{name: scaled(value) for name, value in BASE.reward(example, turns).items()}}
TASK = dataclasses.replace(BASE, name="mine", reward=reward, env_id=None)
"""
SCALE = "def scaled(value):\n    return 0.5 * value\n"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("scale", None)  # of another test
    folder = tmp_path / "my_tasks"
    folder.mkdir()
    (folder / "unused.py").write_text("")
    (folder / "scale.py").write_text(SCALE)
    (folder / "mine.py").write_text(TASK)
    return folder / "mine.py"


def test_a_resume_with_an_edited_task_is_refused(task: Path, tmp_path: Path) -> None:
    settings = {"task": str(task), "task_args": {}}
    run_dir, _ = train_short(tmp_path / "run", **settings)
    saved = [
        path.read_bytes() for path in (run_dir.metrics, run_dir.summary, run_dir.config, run_dir.manifest)
    ]
    for file in (task, task.with_name("scale.py")):
        text = file.read_text()
        file.write_text(text.replace("0.5 *", "-7.0 *") + "\n")
        with pytest.raises(
            UserError, match=rf"sources\.my_tasks/{file.name}: .* then, .* now\n.*Restore what it was"
        ):
            train_short(run_dir.path, resume=True, update__steps=3, **settings)
        file.write_text(text)
    files = (run_dir.metrics, run_dir.summary, run_dir.config, run_dir.manifest)
    assert [path.read_bytes() for path in files] == saved  # a refused resume changes nothing
    assert train_short(run_dir.path, resume=True, update__steps=3, **settings)[1]["steps"] == 3


@pytest.mark.slow
def test_a_resume_does_not_depend_on_what_was_imported_by_now(task: Path, tmp_path: Path) -> None:
    """The reward imports its helper when it is called: after the start has recorded the files, or before."""
    lazy = TASK.replace("from scale import scaled\n", "").replace(
        "    return {", "    from scale import scaled\n    return {"
    )
    task.write_text(lazy)
    run_dir, _ = train_short(tmp_path / "run", task=str(task), task_args={})
    config = short_config(task=str(task), task_args={})
    for recorded in (["my_tasks/mine.py"], ["my_tasks/mine.py", "my_tasks/scale.py"]):
        forgotten = [name for name in sys.modules if name.startswith("sorl_task_") or name == "scale"]
        for name in forgotten:
            del sys.modules[name]
        facts = source_facts(config, load_task(str(task)), recorded)
        assert sorted(facts) == recorded
        run_dir._write_manifest(run_dir.read_manifest() | {"sources": facts})
        record_sources(config, run_dir, load_task(str(task)))
    (task.parent / "scale.py").write_text("")
    with pytest.raises(UserError, match=r"sources\.my_tasks/scale\.py"):
        record_sources(config, run_dir, load_task(str(task)))


def test_a_text_among_the_arguments_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "large.index").write_bytes(b"0")
    arguments = {"hint": "x" * 300 + ".txt", "index": str(tmp_path / "large.index")}
    config = dataclasses.replace(load_config("minihop"), task_args=arguments)
    assert source_facts(config, load_task("minihop", **WORLD)) == {}


def test_the_files_of_a_task(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(folder: Path) -> dict[str, str]:
        names = ("mine.py", "scale.py")
        return {
            f"{folder.name}/{name}": hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in names
        }

    assert own_code(load_task(str(task))) == expected(task.parent)
    assert own_code(load_task("minihop", **WORLD)) == {}
    package = task.parent.with_name("a_package_of_mine")
    package.mkdir()
    (package / "scale.py").write_text(SCALE)
    (package / "mine.py").write_text(TASK.replace("from scale", "from .scale"))
    monkeypatch.syspath_prepend(str(package.parent))
    assert own_code(load_task("a_package_of_mine.mine:TASK")) == expected(package)


def test_demonstrations_and_the_scripts_of_servers(tmp_path: Path) -> None:
    """They make another cold start, too: that of the old ones was taken from the cache."""
    demos, script = tmp_path / "demos.jsonl", tmp_path / "server.py"
    demos.write_text("{}\n")
    script.write_text("")
    config = short_config(sft__demos=str(demos), tools=[f"mcp:python {script} --quiet"])
    minihop = load_task("minihop", **WORLD)
    before = source_facts(config, minihop)
    assert list(before) == ["demos.jsonl", "server.py"]
    only_demos = short_config(sft__demos=str(demos))
    key = start_folder(only_demos)
    demos.write_text("{}\n{}\n")
    after = source_facts(config, minihop)
    assert [name for name in before if before[name] != after[name]] == ["demos.jsonl"]
    assert start_folder(only_demos) != key
    assert source_facts(load_config("minihop"), minihop) == {}
    wrapper = dataclasses.replace(
        load_config("minihop"), task_args={"wrapper": f"{script}:Wrapper", "hops": [1]}
    )
    assert list(source_facts(wrapper, minihop)) == ["server.py"]
