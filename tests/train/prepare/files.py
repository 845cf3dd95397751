"""Small files and prepared folders for the tests of data preparation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="data preparation needs pyarrow")
datasets = pytest.importorskip("datasets", reason="data preparation needs datasets")
import pyarrow.parquet as pq  # noqa: E402

from sorl_train.prepare.build import choose_sources, prepare  # noqa: E402
from sorl_train.prepare.recipes import find_recipe  # noqa: E402

SHARED = {  # data set -> split -> file of the shared data
    "nq": {"train": "nq/train", "test": "nq/test"},
    "hotpotqa": {"train": "hotpotqa/train_distractor", "test": "hotpotqa/test"},
    "alphamed19k": {"train": "alphamed/train_shaped"},
    "medqa": {"test": "medical/medqa_test"},
    "medmcqa": {"test": "medical/medmcqa_dev"},
    "pubmedqa": {"train": "medical/pubmedqa", "test": "medical/pubmedqa"},
    "mmlu_medical": {"test": "medical/mmlu_med_test"},
    "medxpertqa": {"test": "medical/medxpertqa_text"},
    "bioasq": {"test": "medical/bioasq_factoid_yesno"},
}


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def made(name: str, out: Path, *sources: str, **options: Any) -> dict[str, Any]:
    recipe = find_recipe(name)
    return prepare(recipe, choose_sources(recipe, sources), out, **options)
