"""``sorl-data prepare``, as a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_train.prepare.cli import main

from .files import SHARED, jsonl, rows_of

pytestmark = pytest.mark.usefixtures("offline")


def test_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_data: Path) -> None:
    sources = [f"--source={s}={shared_data / f}.jsonl.gz" for s, f in SHARED["hotpotqa"].items()]
    out = tmp_path / "hotpotqa"
    assert main(["prepare", "hotpotqa", *sources, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{out}/train.jsonl: 298 questions" in said.out and "licence cc-by-sa-4.0" in said.out
    assert "test.jsonl: 51 of its questions are in train word for word" in said.err
    assert len(rows_of(out / "overlap.jsonl")) == 51


def test_against_a_file_that_was_not_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = jsonl(tmp_path / "a.jsonl", [{"question": "q?", "golden_answers": ["x"]}])
    raw = jsonl(tmp_path / "mcq.jsonl", [{"question": "q?", "opa": "x"}])
    words = ["prepare", "nq", f"--source=train={good}", "--out", str(tmp_path / "nq"), "--against", str(raw)]
    assert main(words) == 2
    assert "no column 'golden_answers'; give a file that sorl-data prepared" in capsys.readouterr().err
