"""The real files: to one schema, the same bytes each time, with a manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sorl_env import load_examples, load_task

from .files import SHARED, datasets, made, rows_of

pytestmark = pytest.mark.usefixtures("offline")


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
