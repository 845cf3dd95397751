"""``sorl-data prepare``: the command, mistakes in what is to be prepared, and the real files."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from pathlib import Path

import pytest

from sorl_env import UserError, load_examples, load_task
from sorl_train.prepare.build import MANIFEST
from sorl_train.prepare.cli import main
from sorl_train.run.files import atomic_write

from .files import SHARED, datasets, jsonl, made, rows_of

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


def test_a_second_call_takes_no_split_away_and_leaves_nothing_stale(prepared: Path, tmp_path: Path) -> None:
    train, test = f"train={tmp_path / 'a.jsonl'}", f"test={tmp_path / 'b.jsonl'}"
    before = {path.name: path.read_bytes() for path in prepared.iterdir()}
    with pytest.raises(UserError, match=r"nq holds the train split of an earlier call.*or give a new folder"):
        made("nq", prepared, test)
    assert {path.name: path.read_bytes() for path in prepared.iterdir()} == before
    made("nq", tmp_path / "alone", train, against=[prepared / "test.jsonl"])
    assert (tmp_path / "alone" / "overlap.jsonl").exists()
    made("nq", tmp_path / "alone", train)
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["sorl_data.json", "train.jsonl"]
    assert set(json.loads((tmp_path / "alone" / MANIFEST).read_text())["files"]) == {"train.jsonl"}


@pytest.mark.parametrize("written", range(5))
def test_a_call_that_was_cut_short_is_given_again(
    written: int, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No manifest is ever beside data that it does not describe, in a new folder or in one prepared before."""
    sources = [f"train={tmp_path / 'b.jsonl'}", f"test={tmp_path / 'a.jsonl'}"]
    whole = made("nq", tmp_path / "whole", *sources)
    for out in (prepared, tmp_path / "new"):
        names: list[str] = []

        def full_disk(path: Path, text: str, names: list[str] = names) -> None:
            if len(names) == written:
                path.with_name(f".{path.name}.12345678.unfinished").write_text(
                    text[:9]
                )  # as a kill leaves it
                raise OSError(errno.ENOSPC, "No space left on device")
            names.append(path.name)
            atomic_write(path, text)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr("sorl_train.prepare.build.atomic_write", full_disk)
            made("nq", out, *sources)
        if (out / MANIFEST).exists():
            for name, entry in json.loads((out / MANIFEST).read_text())["files"].items():
                assert hashlib.sha256((out / name).read_bytes()).hexdigest() == entry["sha256"]
        assert made("nq", out, *sources) == whole
        assert (out / "train.jsonl").read_bytes() == (tmp_path / "whole" / "train.jsonl").read_bytes()


def test_dropping_all_questions_is_refused(prepared: Path, tmp_path: Path) -> None:
    same = tmp_path / "a.jsonl"
    with pytest.raises(UserError, match="--drop exact: all train questions are for testing, too"):
        made("nq", tmp_path / "out", f"train={same}", f"test={same}", drop="exact")
    assert not (tmp_path / "out").exists()


def test_the_hub_out_of_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "medqa", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.match(
        r"sorl-data: hf:GBaker/MedQA-USMLE-4-options, split 'train': .*Give --source a copy", error, re.DOTALL
    )


@pytest.mark.parametrize("name", SHARED)
def test_real_files_twice(name: str, shared_data: Path, tmp_path: Path) -> None:
    sources = [f"{split}={shared_data / file}.jsonl.gz" for split, file in SHARED[name].items()]
    manifest = made(name, tmp_path / "one", *sources)
    made(name, tmp_path / "two", *sources)
    made(name, tmp_path / "one", *sources)  # over itself
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {f"{split}.jsonl" for split in SHARED[name]} | {"sorl_data.json"} <= set(files)
    for file in files:
        content = (tmp_path / "one" / file).read_bytes()
        assert content == (tmp_path / "two" / file).read_bytes()
        assert str(tmp_path).encode() not in content and str(shared_data).encode() not in content
    task = load_task(name)
    for split, file in SHARED[name].items():
        entry = manifest["files"][f"{split}.jsonl"]
        loaded = load_examples(task, tmp_path / "one", split)
        assert (len(loaded), loaded.sha256) == (entry["rows"], entry["sha256"])
        content = (shared_data / f"{file}.jsonl.gz").read_bytes()
        assert entry["source_sha256"] == hashlib.sha256(content).hexdigest()
        if name != "pubmedqa":  # its one file holds both splits
            published = load_examples(task, shared_data / f"{file}.jsonl.gz", "test")
            assert list(loaded.examples) == list(published.examples)


def test_pubmedqa_is_split_by_its_rows(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "medical/pubmedqa.jsonl.gz"
    manifest = made("pubmedqa", tmp_path / "out", f"train={file}", f"test={file}")
    files = manifest["files"]
    assert (files["train.jsonl"]["rows"], files["test.jsonl"]["rows"]) == (500, 236)
    assert files["train.jsonl"]["dropped"] == {"of the test split": 236}
    assert manifest["overlap"]["with"]["test.jsonl"]["pairs"] == 0


def test_a_folder_loads_with_datasets_and_its_manifest_names_licence_and_counts(
    shared_data: Path, tmp_path: Path
) -> None:
    out, sources = tmp_path / "out", SHARED["hotpotqa"].items()
    manifest = made("hotpotqa", out, *(f"{s}={shared_data / f}.jsonl.gz" for s, f in sources), drop="exact")
    assert (manifest["licence"], manifest["overlap"]["dropped"]) == ("cc-by-sa-4.0", "exact")
    assert manifest["overlap"]["with"] == {"test.jsonl": {"pairs": 51, "train": 51, "test": 51}}
    assert manifest["files"]["train.jsonl"]["dropped"]["also for testing"] == 51
    for split, count in (("train", 247), ("test", 253)):
        cache = str(tmp_path / "cache")
        loaded = datasets.load_dataset("json", data_files=str(out / f"{split}.jsonl"), cache_dir=cache)
        assert len(loaded["train"]) == count == manifest["files"][f"{split}.jsonl"]["rows"]
    train, test = ({row["question"] for row in rows_of(out / f"{s}.jsonl")} for s in ("train", "test"))
    assert len(rows_of(out / "overlap.jsonl")) == 51 and not train & test
