"""Checkpoints of the OpenRLHF engine: kills between any two writes, and every kind of damage. None needs OpenRLHF."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.openrlhf import saves

SCRIPT = Path(__file__).with_name("saves_killed.py")
PARTS = (saves.POLICY, saves.ACTOR, saves.CRITIC)


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


# --- damages --------------------------------------------------------------------------------------------------
def save(checkpoints: Path, step: int) -> Path:
    def write(partial: Path) -> None:
        for part in PARTS:
            (partial / part / "shards").mkdir(parents=True)
            (partial / part / "shards" / "rank_0.pt").write_bytes(bytes(range(256)) * (step + 1))

    folder = checkpoints / f"step_{step:06d}"
    saves.write_whole(folder, step, write)
    return folder


def flip_a_bit(folder: Path) -> None:
    file = folder / "_critic" / "shards" / "rank_0.pt"
    content = bytearray(file.read_bytes())
    content[100] ^= 4
    file.write_bytes(bytes(content))


def remove_part(part: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / part / "shards" / "rank_0.pt"
        file.unlink()

    return damage


def without_a_critic(folder: Path) -> None:
    """As it is when a run of another algorithm wrote it."""
    marker = json.loads((folder / saves.WHOLE).read_text())
    marker["files"] = {name: facts for name, facts in marker["files"].items() if "_critic" not in name}
    (folder / saves.WHOLE).write_text(json.dumps(marker))


def marker(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / saves.WHOLE).write_text(text)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no actor": (remove_part("_actor"), "_actor/shards/rank_0.pt is missing"),
    "no critic": (remove_part("_critic"), "_critic/shards/rank_0.pt is missing"),
    "no policy": (remove_part("policy"), "policy/shards/rank_0.pt is missing"),
    "cut": (
        lambda folder: (folder / "_actor" / "shards" / "rank_0.pt").write_bytes(b"x" * 10),
        "_actor/shards/rank_0.pt has 10 bytes, not 768",
    ),
    "longer": (
        lambda folder: (folder / "_actor" / "shards" / "rank_0.pt").write_bytes(b"x" * 800),
        "has 800 bytes, not 768",
    ),
    "a bit": (flip_a_bit, "_critic/shards/rank_0.pt is not as it was written"),
    "never had a critic": (without_a_critic, "it has no _critic"),
    "no marker": (lambda folder: (folder / saves.WHOLE).unlink(), "it has no whole.json"),
    "empty marker": (marker(""), "its whole.json cannot be read"),
    "cut marker": (marker('{"step": 2, "files": {"po'), "its whole.json cannot be read"),
    "a marker of something else": (marker('["step"]'), "its whole.json cannot be read"),
    "a marker without files": (marker('{"step": 2, "files": {}}'), "it has no policy"),
    "a marker with wrong files": (marker('{"step": 2, "files": {"policy/x": 3}}'), "cannot be read"),
    "a marker with a wrong step": (marker('{"step": "x", "files": {}}'), "cannot be read"),
    "another step's marker": (marker('{"step": 1, "files": {}}'), "its whole.json is that of step 1"),
    "deep": (marker("[" * 100_000), "its whole.json cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(name: str, tmp_path: Path) -> None:
    damage, complaint = DAMAGES[name]
    whole, damaged = save(tmp_path, 1), save(tmp_path, 2)
    assert saves.resume_point(tmp_path, PARTS).folder == damaged
    damage(damaged)
    point = saves.resume_point(tmp_path, PARTS)
    assert (point.folder, point.step) == (whole, 1)
    (line,) = point.passed_over
    assert line.startswith("step_000002: ") and complaint in line


def test_without_a_whole_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no whole checkpoint in"):
        saves.resume_point(tmp_path, PARTS)
    flip_a_bit(save(tmp_path, 3))
    with pytest.raises(UserError, match=r"step_000003: _critic/shards/rank_0.pt is not as it was written"):
        saves.resume_point(tmp_path, PARTS)


def test_the_shards_of_an_earlier_version_are_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    """They lay in folders of their own, and could be of different steps."""
    for folder in ("_actor/global_step4", "_critic/global_step2", "step_000004/policy"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UserError, match="by an earlier version"):
        saves.resume_point(tmp_path, PARTS)
    assert (tmp_path / "_actor" / "global_step4").is_dir()  # and they are left alone


def test_large_files_are_checked_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "HASHED_BYTES", 600)
    folder = save(tmp_path, 2)
    facts = json.loads((folder / saves.WHOLE).read_text())["files"]
    assert facts["_actor/shards/rank_0.pt"] == {"bytes": 768}
    assert (
        "sha256"
        in json.loads((save(tmp_path, 1) / saves.WHOLE).read_text())["files"]["policy/shards/rank_0.pt"]
    )
    assert saves.problem_of(folder, PARTS) is None


def test_older_checkpoints_go_and_later_ones_stay(tmp_path: Path) -> None:
    """A run that was resumed from step 2 because step 9 was damaged must not delete what it saves at step 3."""
    for step in (1, 2, 9, 3):
        save(tmp_path, step)
    saves.prune(tmp_path, 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000009"]


def test_a_step_is_saved_again_in_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    flip_a_bit(save(tmp_path, 2))
    save(tmp_path, 2)
    assert saves.resume_point(tmp_path, PARTS).step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full_disk(partial: Path) -> None:
        (partial / "policy").mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        saves.write_whole(tmp_path / "step_000002", 2, full_disk)
    assert saves.resume_point(tmp_path, PARTS).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
