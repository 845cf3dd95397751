"""Which checkpoint a run goes on from when files of its folder are damaged, or after a kill between any two writes."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig
from sorl_train.run.checkpoint import (
    HASHES,
    atomic_folder,
    list_checkpoints,
    log_lengths,
    prune_checkpoints,
    remove_folder,
    resume_point,
    rewind,
    tell_state,
)
from sorl_train.run.folder import RunDir, saved_config

from ..damage import DAMAGES, append, delete, flip_a_bit, truncate

FILES = "state.json optimizer.safetensors policy/model.safetensors policy/config.json replay.jsonl".split()


def save(run: RunDir, step: int) -> Path:
    """A checkpoint as the engine writes it, of files that nobody loads."""
    run.metrics.open("a").write(f'{{"step": {step}, "loss/a": 0.5}}\n')
    run.timings.open("a").write(f'{{"step": {step}, "time/a": 0.5}}\n')

    checkpoint = run.checkpoints / f"step_{step:06d}"
    with atomic_folder(checkpoint, run.run_id) as folder:
        (folder / "policy").mkdir()
        for name in FILES[1:]:
            (folder / name).write_text(f"{name} of step {step}\n" * 20)
        (folder / "policy" / "README.md").write_text("a card")
        (folder / "state.json").write_text(json.dumps({"step": step, "logs": log_lengths(run)}))
    return checkpoint


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunDir.create(tmp_path_factory.mktemp("template") / "run", TrainConfig())
    for step in (1, 2, 3):
        save(run, step)
    return run.path


@pytest.fixture
def run(template: Path, tmp_path: Path) -> RunDir:
    """A run of three checkpoints, killed after the last one."""
    return RunDir(shutil.copytree(template, tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_of(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """What would show that anything was written."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", [*FILES, HASHES])
def test_a_damaged_checkpoint_is_passed_over_and_the_file_named(
    run: RunDir, name: str, damage: Callable[[Path], None]
) -> None:
    newest = run.checkpoints / "step_000003"
    damage(newest / name)
    point = resume_point(run)
    assert point.path.name == "step_000002"
    assert list(point.damaged) == [newest]
    (told,) = point.passed_over
    assert told.startswith("passed over step_000003: ") and (name in told or name == HASHES)
    assert list_checkpoints(run.checkpoints)[-1] == newest  # to look changes nothing
    tell_state(run, [].append, point)
    assert resume_point(run).passed_over == []
    assert (run.checkpoints / "damaged_step_000003").is_dir()


def test_a_file_of_another_run_or_a_whole_checkpoint_of_one(run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(tmp_path / "other", TrainConfig(seed=1))
    foreign, newest = save(other, 3), run.checkpoints / "step_000003"
    (newest / "optimizer.safetensors").write_text("another run's")
    assert "optimizer.safetensors has 13 bytes" in resume_point(run).passed_over[0]
    remove_folder(newest)
    shutil.copytree(foreign, newest)
    point = resume_point(run)
    assert point.path.name == "step_000002" and "belongs to another run" in point.passed_over[0]


def test_a_file_that_was_added_is_named_and_cards_may_be_edited(run: RunDir) -> None:
    """A loader would take up an adapter_config.json; what people and file systems leave is harmless."""
    assert resume_point(run).path.name == "step_000003"
    policy = run.checkpoints / "step_000003" / "policy"
    (policy / "README.md").write_text("license: mit")
    (policy / ".DS_Store").write_text("")
    assert not resume_point(run).passed_over
    (policy / "adapter_config.json").write_text("{}")
    assert "policy/adapter_config.json was added" in resume_point(run).passed_over[0]


def test_a_changed_name_of_a_key_turns_no_check_off(run: RunDir) -> None:
    hashes = run.checkpoints / "step_000003" / HASHES
    hashes.write_text(hashes.read_text().replace("sha256", "sha257", 1))
    assert f"{HASHES} is damaged" in resume_point(run).passed_over[0]


def test_no_checkpoint_is_whole(run: RunDir) -> None:
    for number, name in ((1, FILES[0]), (2, FILES[1]), (3, HASHES)):
        truncate(run.checkpoints / f"step_00000{number}" / name)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole") as caught:
        resume_point(run)
    damaged = ("step_000003: hashes.json", "step_000002: optimizer", "step_000001: state")
    assert all(expected in str(caught.value) for expected in (*damaged, "copy", "anew"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
@pytest.mark.parametrize(
    "damage", [damage for damage in DAMAGES if damage is not append], ids=lambda damage: damage.__name__
)
def test_damaged_metrics_are_refused_by_name(run: RunDir, name: str, damage: Callable[[Path], None]) -> None:
    damage(run.path / name)
    with pytest.raises(UserError, match=rf"(?s){name}.*copy"):
        resume_point(run)


def test_metrics_are_cut_back_to_what_the_checkpoint_saw(run: RunDir) -> None:
    """Whatever came after it: whole lines, a half one, a file that was not there."""
    before = run.metrics.read_bytes(), run.timings.read_bytes()
    run.metrics.open("a").write('{"step": 4}\n{"step": 5, "lo')
    run.timings.open("ab").write(b"\xff\xfe")
    run.events.write_text('{"step": 4, "kind": "collapse_alarm"}\n')
    rewind(run, resume_point(run).path)
    assert (run.metrics.read_bytes(), run.timings.read_bytes()) == before
    assert not run.events.exists()


def become_another_seed(path: Path) -> None:
    """One bit of a fact, which leaves a manifest that can be read."""
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [("config.yaml", damage) for damage in DAMAGES]
    # a bit may be in the name of the manifest's hash, where it changes no fact
    + [("manifest.json", become_another_seed if damage is flip_a_bit else damage) for damage in DAMAGES],
)
def test_a_damaged_config_or_manifest_is_refused_by_name(
    run: RunDir, name: str, damage: Callable[[Path], None]
) -> None:
    damage(run.path / name)
    before = state_of(run.path)
    with pytest.raises(UserError, match=name):
        RunDir.resume(run.path, TrainConfig())
    assert state_of(run.path) == before


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
def test_another_runs_config_or_manifest_is_refused(name: str, run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(tmp_path / "other", TrainConfig(seed=1))
    shutil.copy(other.path / name, run.path / name)
    with pytest.raises(UserError, match=r"config\.yaml is not the file that this run wrote"):
        RunDir.resume(run.path, TrainConfig())


def test_an_emptied_or_edited_config_is_no_default_for_others_either(run: RunDir) -> None:
    """What sorl-eval reads of a run."""
    assert saved_config(run.path) == TrainConfig()
    for text in (run.config.read_text().replace("seed: 0", "seed: 5"), "{}", "a: [", "\0"):
        run.config.write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml is not the file that this run wrote"):
            saved_config(run.path)
    run.config.write_text("")
    with pytest.raises(UserError, match=r"config\.yaml is empty"):
        saved_config(run.path)


def test_a_config_is_the_runs_own_over_resumes_and_kills_between_two_writes(run: RunDir) -> None:
    old = run.config.read_bytes()
    again, _ = RunDir.resume(run.path, TrainConfig(run_dir="moved"))
    again.begin_resume()
    assert run.config.read_bytes() != old
    resume_point(again)
    run.config.write_bytes(old)  # killed after the manifest was written, before the config was
    RunDir.resume(run.path, TrainConfig())


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        SafetensorError('I/O error: No space left on device (os error 28) at path "/a/.tmpDsxHSA"'),
    ],
)
def test_a_full_disk_leaves_the_older_checkpoints_and_nothing_else(error: Exception, run: RunDir) -> None:
    with (
        pytest.raises(OSError, match="No space"),
        atomic_folder(run.checkpoints / "step_000003", run.run_id) as folder,
    ):
        (folder / "state.json").write_text("{}")
        raise error
    assert names(run.checkpoints) == ["step_000001", "step_000002", "step_000003"]
    assert resume_point(run).path.name == "step_000003"


def test_weights_that_do_not_fit_are_an_error_of_the_disk(tmp_path: Path) -> None:
    """safetensors raises an error of its own, which no command takes for a full disk. A real limit on a file's size."""
    code = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from sorl_train.run.checkpoint import atomic_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with atomic_folder(Path(sys.argv[1])) as folder:
        save_file({"a": torch.zeros(9999)}, folder / "a.safetensors")
except OSError as error:
    print(type(error).__name__, error.errno, error.filename)
"""
    folder = tmp_path / "weights"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["OSError", str(errno.EFBIG), str(folder)]
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_what_safetensors_lets_nobody_else_read(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "weights") as folder:
        (folder / "model.safetensors").touch(mode=0o600)
    beside = tmp_path / "beside"
    beside.touch()
    assert (tmp_path / "weights" / "model.safetensors").stat().st_mode == beside.stat().st_mode


def test_pruning_leaves_what_is_not_ours(run: RunDir) -> None:
    (run.checkpoints / ".nfs0001").write_text("")
    (run.checkpoints / "notes.txt").write_text("")
    (run.checkpoints / ".step_000009.77").mkdir()
    prune_checkpoints(run.checkpoints, 9)
    assert not (run.checkpoints / ".step_000009.77").exists()
    assert (run.checkpoints / ".nfs0001").exists() and (run.checkpoints / "notes.txt").exists()


def test_a_linked_checkpoint_is_read_and_pruned_as_any_other(run: RunDir, tmp_path: Path) -> None:
    """Somebody moved it to a larger disk: only the link goes."""
    elsewhere = (run.checkpoints / "step_000001").rename(tmp_path / "elsewhere")
    (run.checkpoints / "step_000001").symlink_to(elsewhere)
    delete(run.checkpoints / "step_000003" / "state.json")
    delete(run.checkpoints / "step_000002" / "state.json")
    assert resume_point(run).path.name == "step_000001"
    prune_checkpoints(run.checkpoints, 1)
    assert elsewhere.is_dir() and names(run.checkpoints) == ["step_000003"]


SCRIPT = Path(__file__).with_name("checkpoints_killed.py")


def killed(folder: Path, keep: int, steps: int) -> list[dict[str, Any]]:
    """What is left of a run that was killed before each of its file operations."""
    command = [sys.executable, str(SCRIPT), str(folder), str(keep), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_kills(found: list[dict[str, Any]], steps: int) -> None:
    """A checkpoint that was once whole is there after any kill, of one step in all of its parts; so is the best."""
    assert len(found) > 20 * steps and found[-1]["done"] == steps
    for number, left in enumerate(found, start=1):
        assert left["resumed"] in (left["done"], left["done"] + 1), (number, left)
        assert left["parts"] == ([left["resumed"]] if left["resumed"] else []), (number, left)
        assert left["hidden"] == 0 and not left.get("passed"), (number, left)
        # step 2 is the first best one: it was saved as such before the step's own checkpoint
        near = ([left["resumed"] - 1], [left["resumed"]], [left["resumed"] + 1])
        assert left["best"] in (near if left["resumed"] >= 2 else ([], *near)), (number, left)


def test_a_kill_between_any_two_writes(tmp_path: Path) -> None:
    check_kills(killed(tmp_path, keep=1, steps=2), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_between_any_two_writes_of_a_longer_run(keep: int, tmp_path: Path) -> None:
    check_kills(killed(tmp_path, keep, steps=4), steps=4)
