"""``sorl-data prepare`` as a command, and mistakes in what is to be prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sorl_env import UserError
from sorl_train.prepare.build import MANIFEST
from sorl_train.prepare.cli import main

from .files import SHARED, jsonl, made, rows_of

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


def test_unreadable_rows(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "x.jsonl",
        [{"question": "q?", "golden_answers": ["a"]}, {"question": 3, "golden_answers": ["a"]}],
    )
    with pytest.raises(UserError, match=r"x\.jsonl:2: not a row of nq: column 'question' must be a text"):
        made("nq", tmp_path / "out", f"train={file}")
    assert not (tmp_path / "out").exists()
    manifest = made("nq", tmp_path / "out", f"train={file}", skip_unreadable=True)
    assert manifest["files"]["train.jsonl"]["dropped"] == {"unreadable": 1}


def test_a_second_call_with_fewer_splits_leaves_nothing_stale(prepared: Path, tmp_path: Path) -> None:
    assert (prepared / "overlap.jsonl").exists()
    made("nq", prepared, f"test={tmp_path / 'b.jsonl'}")
    assert sorted(path.name for path in prepared.iterdir()) == ["sorl_data.json", "test.jsonl"]
    assert set(json.loads((prepared / MANIFEST).read_text())["files"]) == {"test.jsonl"}


def test_the_hub_out_of_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "medqa", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.match(
        r"sorl-data: hf:GBaker/MedQA-USMLE-4-options, split 'train': .*Give --source a copy", error, re.DOTALL
    )
