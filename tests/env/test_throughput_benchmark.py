"""benchmarks/env_throughput.py runs, with the packages it measures against and without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The benchmark, quickly, in a process that finds neither peer."""
    for package in ("gem", "skyrl_gym"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text(
            f"raise ModuleNotFoundError('none', name={package!r})\n"
        )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    sizes = ["--rounds", "3", "--seconds", "0.01"]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "env_throughput.py"), *sizes, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_figures_without_peers(tmp_path: Path) -> None:
    done = run(tmp_path, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    assert "not installed: gem-llm (no module gem); pip install gem-llm==0.1.0" in done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ratio_to_faster_peer"] is None
    assert set(figures["steps_per_s"]) == {"sorl", "sorl, server"}
    assert all(name in done.stdout for name in figures["steps_per_s"])
