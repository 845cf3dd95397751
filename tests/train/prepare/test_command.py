"""``sorl-data``: prepare and check."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_train.prepare.cli import main

from .files import SHARED, jsonl, rows_of

pytestmark = pytest.mark.usefixtures("offline")


def test_prepare_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_data: Path) -> None:
    sources = [f"--source={s}={shared_data / f}.jsonl.gz" for s, f in SHARED["hotpotqa"].items()]
    out, pairs = tmp_path / "hotpotqa", tmp_path / "pairs.jsonl"
    assert main(["prepare", "hotpotqa", *sources, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{out}/train.jsonl: 298 questions" in said.out and "licence cc-by-sa-4.0" in said.out
    assert "test.jsonl: 51 of its questions are in train word for word" in said.err
    assert main(["check", str(out / "train.jsonl"), str(out / "test.jsonl"), "--out", str(pairs)]) == 1
    shown = capsys.readouterr().out
    assert "51 pairs of the same one, 51 questions of the first file, 51 of the second" in shown
    assert rows_of(out / "overlap.jsonl") == [{"with": "test.jsonl", **pair} for pair in rows_of(pairs)]


def test_check_of_clean_files(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(prepared / "train.jsonl"), str(prepared / "test.jsonl")]) == 0
    assert "0 pairs" in capsys.readouterr().out


def test_rows_that_need_their_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = jsonl(tmp_path / "mcq.jsonl", [{"question": "q?", "opa": "x"}])
    assert main(["check", str(row), str(row)]) == 2
    assert (
        "no column 'golden_answers'. --task NAME reads the columns of that task." in capsys.readouterr().err
    )
