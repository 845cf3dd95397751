"""The benchmarks of search run. Recall is what the docs say of it; rates mean nothing at these sizes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..corpora import made_up, write_jsonl

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


def run(name: str, folder: Path, *options: str | Path) -> dict[str, Any]:
    report = folder / "report.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "search"),
        name,
        *map(str, options),
        "--json",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def test_recall_of_bm25(shared_data: Path, tmp_path: Path) -> None:
    """The bars are bm25s' own figures, with its English stemmer, on the same passages and questions."""
    report = run("recall", tmp_path, "--data", shared_data, "--work", tmp_path)
    recall = {row["questions"]: row["recall"] for row in report["rows"]}
    assert recall["nq"] == pytest.approx(0.784, abs=0.01)
    assert recall["hotpotqa"] == pytest.approx(0.407, abs=0.01)
    assert recall["pubmedqa"] == pytest.approx(0.944, abs=0.01)
    assert recall["bioasq"] == pytest.approx(0.870, abs=0.01)


def test_scale(shared_data: Path, tmp_path: Path) -> None:
    corpus = shared_data / "corpus" / "wiki.jsonl.gz"
    report = run("scale", tmp_path, "--corpus", corpus, "--sizes", "2000", "4000")
    small, large = report["rows"]
    assert small["queries_per_s"] > 0 and small["build_memory"] > 10e6 and small["open_seconds"] > 0
    line = large["disk"] + (large["disk"] - small["disk"]) * (21_000_000 - 4000) / 2000
    assert report["line"]["disk"] == pytest.approx(line)


def test_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    corpus = write_jsonl(tmp_path / "corpus.jsonl.gz", made_up(500))
    questions = tmp_path / "questions.jsonl.gz"
    with gzip.open(questions, "wt") as file:
        file.writelines(json.dumps({"question": f"which river is word{n}?"}) + "\n" for n in range(60))
    sizes = "--workers 1 --connections 4 --rounds 1 --seconds 0.5".split()
    figures = run("rate", tmp_path, "--corpus", corpus, "--questions", questions, *sizes)
    assert len(figures["medians"]) == 3
    for name, one in figures["medians"].items():
        assert one["queries_per_s"] > 0 and 0 < one["p50_ms"] <= one["p99_ms"] and one["memory_mb"] > 10, name
        assert one["errors"] == 0
