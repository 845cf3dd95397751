"""benchmarks/losses.py runs, and its figures say what the README says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_benchmark_writes_its_figures(tmp_path: Path) -> None:
    sizes = ["--rows", "8", "--columns", "512", "--rounds", "3", "--positions", "8", "--vocabulary", "512"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "losses.py"),
        *sizes,
        "--json",
        str(tmp_path / "f.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "turn / token: time" in done.stdout
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["losses"]["turn"]["peak_ratio"] < 1.1
    assert set(figures["losses"]) == {"token", "turn", "sequence"}
    assert figures["log_probs_bfloat16"]["token_log_probs"]["milliseconds"] > 0
