"""Both notebooks run from top to bottom, and the committed outputs are theirs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from .notebooks import TUTORIALS, execute


def outputs(notebook: dict[str, Any]) -> list[Any]:
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TUTORIALS / name).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.name)
def test_committed_outputs_are_small_and_name_no_folder(path: Path) -> None:
    shown = json.dumps(outputs(committed(path.name)))
    assert len(shown) < 100_000 and any(outputs(committed(path.name)))
    assert not [
        word for word in ("/home", "/root", "/tmp", "/work", "/Users", "site-packages") if word in shown
    ]


def test_the_environment_answers_as_the_notebook_shows() -> None:
    assert outputs(execute(TUTORIALS / "environment.ipynb")) == outputs(committed("environment.ipynb"))


@pytest.mark.slow
def test_two_minutes_of_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Success rises. The figures are those of one kind of processor, so their lines are compared in number alone."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found, kept = (
        outputs(n) for n in (execute(TUTORIALS / "two_minutes.ipynb"), committed("two_minutes.ipynb"))
    )
    success, curve, acted = 1, 2, 3  # cells
    assert [len(cell) for cell in found] == [len(cell) for cell in kept]
    for cell in (success, acted):
        assert len(found[cell][0]["text"]) == len(kept[cell][0]["text"])
    values = [float(value) for value in found[curve][0]["data"]["text/plain"][0].split()]
    assert max(values[1:]) >= values[0] + 0.15, values
