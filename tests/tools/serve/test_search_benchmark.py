"""The benchmarks of sorl-serve run; their figures mean nothing at these sizes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = str(Path(__file__).resolve().parents[3] / "benchmarks" / "search")

pytestmark = pytest.mark.slow


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """The figures of a benchmark over a small corpus."""
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        for number in range(500):
            file.write(
                json.dumps({"id": str(number), "contents": f'"T{number}"\nword{number % 50} river'}) + "\n"
            )
    with gzip.open(folder / "questions.jsonl.gz", "wt") as file:
        file.writelines(
            json.dumps({"question": f"which river is word{number}?"}) + "\n" for number in range(60)
        )
    data = ["--corpus", folder / "corpus.jsonl.gz", "--questions", folder / "questions.jsonl.gz"]
    sizes = ["--workers", "1", "--connections", "4", "--json", folder / "figures.json"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, name, *map(str, data), *map(str, sizes), *options],
        env={**os.environ, "SORL_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in (0, 1), done.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


def test_rate(tmp_path: Path) -> None:
    figures = run("rate", tmp_path, "--rounds", "1", "--seconds", "0.5")
    assert len(figures["medians"]) == 3
    for name, one in figures["medians"].items():
        assert one["queries_per_s"] > 0 and 0 < one["p50_ms"] <= one["p99_ms"] and one["memory_mb"] > 10, name
        assert one["errors"] == 0
