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

from sorl_tools.index.build.build import build

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
    assert len(figures["medians"]) == 6
    for name, one in figures["medians"].items():
        assert one["queries_per_s"] > 0 and 0 < one["p50_ms"] <= one["p99_ms"] and one["memory_mb"] > 10, name
        assert one.get("errors", 0) == 0
    assert figures["batched_to_in_process"] > 0 and figures["single_to_plain"] > 0


def test_soak(tmp_path: Path) -> None:
    figures = run("soak", tmp_path, "--seconds", "3")
    assert figures["errors"] == 0 and figures["statuses"] == {"200": figures["requests"]}
    assert min(figures["memory_mb"]) > 10 and figures["p99_drift"] > 0


def test_backends(tmp_path: Path) -> None:
    rows = [{"id": str(n), "contents": f'"T{n}"\nword{n % 50} river'} for n in range(500)]
    (tmp_path / "corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    manifest = build([tmp_path / "corpus.jsonl"], tmp_path / "index")
    with gzip.open(tmp_path / "questions.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"question": f"word{number}"}) + "\n" for number in range(50))
    options = ["--questions", "questions.jsonl.gz", "--seconds", "0.5", "--json", "figures.json"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, "backends", "index", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert (row["backend"], row["passages"]) == ("bm25", 500)
    assert row["disk_mb"] == pytest.approx(manifest.bytes / 2**20)
    assert 0 < row["alone_p50_ms"] <= row["alone_p99_ms"] and row["queries_per_s"] > 0
