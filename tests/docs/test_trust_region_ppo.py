"""PPO with the trust region in a loop of somebody else: runs of seconds at a rate where plain PPO falls."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "docs" / "tutorials" / "trust_region_ppo.py"
LR = 0.1


@pytest.fixture(scope="module")
def ppo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trust_region_ppo", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(FILE), "--lr", str(LR), "--steps", "10000", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_region_holds_where_plain_ppo_falls(ppo: ModuleType) -> None:
    plain, held = run(), run("--limit", str(ppo.LIMIT))
    assert plain["final"] < 12.0 and plain["kl"] > 10.0  # the pole falls at once
    assert held["final"] > 60.0 and held["kl"] <= ppo.LIMIT
    assert held["moves"] >= 1 and held["scale"] < 0.5


def test_the_study_has_both_arms_and_goes_on_where_it_was_stopped(
    ppo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"steps": 4 * 16 * 64, "length": 64, "epochs": 2}  # one episode in each copy
    monkeypatch.setattr(ppo, "SETTINGS", {"Pendulum-v1": ppo.SETTINGS["Pendulum-v1"] | short})
    monkeypatch.setattr(ppo, "RATES", [LR])
    monkeypatch.setattr(ppo, "SEEDS", 1)
    path = tmp_path / "study" / "runs.jsonl"
    ppo.study(path)
    written = path.read_text()
    plain, held = map(json.loads, written.splitlines())
    assert (plain["limit"], held["limit"]) == (None, ppo.LIMIT)
    assert held["kl"] <= ppo.LIMIT < plain["kl"] and -2000.0 < held["final"] < -100.0
    path.write_text(written.splitlines()[0] + "\n")
    ppo.study(path)
    assert path.read_text() == written
