"""Mistakes in what is to be prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sorl_env import UserError
from sorl_train.prepare.build import MANIFEST
from sorl_train.prepare.cli import main

from .files import jsonl, made

pytestmark = pytest.mark.usefixtures("offline")


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
