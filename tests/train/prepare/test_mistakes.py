"""Mistakes in what is to be prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sorl_env import UserError
from sorl_train.prepare.build import MANIFEST, choose_sources
from sorl_train.prepare.cli import main
from sorl_train.prepare.recipes import find_recipe

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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("3", "it must be a list of JSON objects"),
        ('{"a": [], "b": []}', "an object with 2 lists"),
        ("[1]", "it must be a list of JSON objects"),
    ],
)
def test_a_json_file_of_another_form(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=message):
        made("hotpotqa", tmp_path / "out", f"train={tmp_path / 'x.json'}")


def test_sources(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", [{"question": "q?", "golden_answers": ["a"]}])
    nq = find_recipe("nq")
    assert choose_sources(nq, []) == dict.fromkeys(("train", "test"), "hf:RUC-NLPIR/FlashRAG_datasets")
    assert choose_sources(nq, ["test=hf:a/b"]) == {"test": "hf:a/b"}
    for given, message in (
        ([str(file)], "a file has one split; say which: --source train="),
        ([f"tset={file}"], "Did you mean 'test'"),
        ([f"train={file}", f"train={file}"], "gives split 'train' twice"),
    ):
        with pytest.raises(UserError, match=message):
            choose_sources(nq, given)
    with pytest.raises(UserError, match="bioasq is not on the hub: give --source"):
        choose_sources(find_recipe("bioasq"), [])
    with pytest.raises(UserError, match="Did you mean 'medqa'"):
        find_recipe("medq")


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", [{"question": "q?", "golden_answers": ["a"]}])
    with pytest.raises(UserError, match="contains files that sorl-data did not write"):
        made("nq", tmp_path, f"train={file}")
    with pytest.raises(UserError, match="is a file; give a folder"):
        made("nq", file, f"train={file}")


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
