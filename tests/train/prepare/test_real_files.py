"""The real files: to one schema, the same bytes each time, with a card."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

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
    assert {f"{split}.jsonl" for split in SHARED[name]} | {"README.md", "sorl_data.json"} <= set(files)
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
            # the same questions as the task reads from the published rows, but for the corpora's own columns
            published = load_examples(task, shared_data / f"{file}.jsonl.gz", "test").examples
            assert [e.id for e in loaded.examples] == [e.id for e in published]
            assert [(e.question, e.golden_answers, e.options) for e in loaded.examples] == [
                (e.question, e.golden_answers, e.options) for e in published
            ]
            assert all(e.metadata == p.metadata for e, p in zip(loaded.examples, published, strict=True))


def test_pubmedqa_is_split_by_its_rows(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "medical/pubmedqa.jsonl.gz"
    manifest = made("pubmedqa", tmp_path / "out", f"train={file}", f"test={file}")
    files = manifest["files"]
    assert (files["train.jsonl"]["rows"], files["test.jsonl"]["rows"]) == (500, 236)
    assert files["train.jsonl"]["dropped"] == {"of the test split": 236}
    assert manifest["overlap"]["with"]["test.jsonl"]["exact_pairs"] == 0


def test_the_card_loads_with_datasets_and_names_licence_and_counts(shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(
        "hotpotqa",
        out,
        *(f"{s}={shared_data / f}.jsonl.gz" for s, f in SHARED["hotpotqa"].items()),
        drop="exact",
    )
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "cc-by-sa-4.0"
    assert "| train.jsonl | train | 247 | training |" in text
    assert "| test.jsonl | test | 253 | evaluation only: training on it is refused |" in text
    assert "| test.jsonl | 51 test questions | 0 test questions |" in text and "51 also for testing" in text
    for split, count in (("train", 247), ("test", 253)):
        loaded = datasets.load_dataset(str(out), split, cache_dir=str(tmp_path / "cache"))
        assert {name: len(rows) for name, rows in loaded.items()} == {split: count}
    assert len(rows_of(out / "overlap.jsonl")) == 51
    assert not {r["question"] for r in rows_of(out / "train.jsonl")} & {
        r["question"] for r in rows_of(out / "test.jsonl")
    }
