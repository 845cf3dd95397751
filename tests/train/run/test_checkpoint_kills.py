"""Checkpoints of runs that are killed between any two of their file operations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
