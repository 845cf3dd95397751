"""The benchmarks ``recall`` and ``scale`` run, and their figures are what the docs say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    report = folder / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "search"), name, *options, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


@pytest.mark.slow
def test_recall_of_bm25(shared_data: Path, tmp_path: Path) -> None:
    """The bars are bm25s' own figures, with its English stemmer, on the same passages and questions."""
    report = run("recall", tmp_path, "--data", str(shared_data), "--work", str(tmp_path))
    recall = {row["questions"]: row["recall"] for row in report["rows"]}
    assert recall["nq"] == pytest.approx(0.784, abs=0.01)
    assert recall["hotpotqa"] == pytest.approx(0.407, abs=0.01)
    assert recall["pubmedqa"] == pytest.approx(0.944, abs=0.01)
    assert recall["bioasq"] == pytest.approx(0.870, abs=0.01)


@pytest.mark.slow
def test_scale(shared_data: Path, tmp_path: Path) -> None:
    corpus = shared_data / "corpus" / "wiki.jsonl.gz"
    report = run(
        "scale",
        tmp_path,
        "--corpus",
        str(corpus),
        "--sizes",
        "2000",
        "4000",
    )
    small, large = report["rows"]
    assert small["queries_per_s"] > 0 and small["build_memory"] > 10e6 and small["open_seconds"] > 0
    line = large["disk"] + (large["disk"] - small["disk"]) * (21_000_000 - 4000) / 2000
    assert report["line"]["disk"] == pytest.approx(line)
