"""Examples from files, folders and the hub, and what is said when there are none."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_env import Example, HubSource, Task, UserError, load_examples
from sorl_env.task import data as data_module

ROWS = [
    {"id": f"r{i}", "question": f"Quéstion {i}\u2028?", "golden_answers": [f"a{i}", "b"]} for i in range(3)
]
EXPECTED = tuple(Example(row["id"], row["question"], tuple(row["golden_answers"])) for row in ROWS)  # type: ignore[arg-type]


def jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    if path.name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(jsonl(rows)))
    else:
        path.write_bytes(jsonl(rows))
    return path


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.parquet"])
def test_a_file_or_its_folder(task: Task, tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name)
    for source in (str(file), file, str(tmp_path)):
        loaded = load_examples(task, source, "train")
        assert loaded.examples == EXPECTED and len(loaded) == 3
        assert (loaded.source, loaded.split, loaded.is_sample) == (str(file), "train", False)
        assert loaded.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_split_picks_the_file_of_a_folder_and_labels_a_single_file(task: Task, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    test = write(tmp_path / "test.jsonl.gz", ROWS[:1])
    assert len(load_examples(task, tmp_path, "test")) == 1
    assert load_examples(task, test, "validation").split == "validation"
    with pytest.raises(UserError, match=r"no split 'tset' .*Did you mean 'test'\?"):
        load_examples(task, tmp_path, "tset")
    (tmp_path / "x.jsonl").write_bytes(b"\n" + jsonl(ROWS).replace(b"\n", b"\r\n\n") + b"  \n")
    assert load_examples(task, tmp_path / "x.jsonl").examples == EXPECTED  # blank lines, and other line ends


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "a row must be a JSON object, not list"),
        (b"null", "a row must be a JSON object, not NoneType"),
        (b'{"id": "\xff"}', "not valid JSON"),
        (b'{"id": "r", "a": []}', "no column 'question' for task toy; the row has id, a"),
        (b"{}", "no column 'id' for task toy; the row has none"),
        (b'{"id": "r", "question": "q", "golden_answers": 3}', "not a row of task toy: 'int' object is not"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_an_unreadable_row_is_named_by_file_and_line(
    task: Task, tmp_path: Path, name: str, line: bytes, problem: str
) -> None:
    content = jsonl(ROWS[:2]) + b"\n" + line + b"\n" + jsonl(ROWS[2:])
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(UserError) as caught:
        load_examples(task, file)
    assert str(caught.value).startswith(f"{file}:4: {problem}")


def test_rows_and_examples_that_do_not_fit_are_named(task: Task, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"answers": []}')
    first = dataclasses.replace(task, parse_row=lambda row: row["answers"][0])
    with pytest.raises(UserError, match=r"rows.jsonl:1: not a row of task toy: list index"):
        load_examples(first, tmp_path / "rows.jsonl")
    dated = Example("r", "q", metadata={"when": datetime.date(2026, 1, 1)})
    with pytest.raises(UserError, match=r"example 'r': its metadata must hold JSON values: .*date"):
        load_examples(dataclasses.replace(task, embedded=lambda split: [dated]), None)


def test_broken_containers_are_named(task: Task, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    whole = gzip.compress(jsonl(ROWS))
    for name, content, problem in (
        ("a.jsonl.gz", b"no gzip", "not a readable gzip file"),
        ("b.jsonl.gz", whole[:-10], "not a readable gzip file"),
        ("c.jsonl.gz", whole[:12] + b"\xff" * 8 + whole[20:], "not a readable gzip file"),
        ("d.parquet", b"no parquet", "not a readable Parquet file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: {problem}"):
            load_examples(task, tmp_path / name)


def test_embedded_examples(task: Task, make_task: Callable[..., Task]) -> None:
    loaded = load_examples(task, None, "test")
    assert (loaded.source, loaded.split, len(loaded)) == ("embedded", "test", 6)
    again = load_examples(make_task(name="other"), None, "test")
    assert loaded.sha256 == again.sha256
    shorter = load_examples(make_task(embedded=lambda split: loaded.examples[:5]), None, "test")
    assert shorter.sha256 != loaded.sha256
    with pytest.raises(UserError, match="task toy has no examples of its own: give --data"):
        load_examples(make_task(embedded=None))
    with pytest.raises(UserError, match="embedded: split 'dev' of task toy has no examples"):
        load_examples(make_task(embedded=lambda split: ()), None, "dev")


def test_a_sample_says_once_that_it_is_one(
    make_task: Callable[..., Task], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_warned", set())
    sample = make_task(embedded_is_sample=True)
    with caplog.at_level(logging.WARNING, logger="sorl_env"):
        assert load_examples(sample).is_sample and load_examples(sample).is_sample
    assert [record.message for record in caplog.records] == [
        "task toy uses its embedded sample, which is not the benchmark: give --data (data= in Python) for "
        "real questions"
    ]


class DatasetsError(Exception):
    """The base of what `datasets` raises for damaged data."""


class FakeHub:
    """Stands in for the `datasets` package: what it was asked for, and rows or an error."""

    exceptions = SimpleNamespace(DatasetsError=DatasetsError)

    def __init__(self, result: list[dict[str, Any]] | Exception) -> None:
        self.result = result
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        self.asked.append((path, name, split))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("data", "asked", "source"),
    [
        ("hf:own/data:cfg", ("own/data", "cfg", "test"), "hf:own/data:cfg"),
        ("hf:own/data", ("own/data", None, "test"), "hf:own/data"),
        ("hf:", ("org/toy", "main", "validation"), "hf:org/toy:main"),
        ("hf:org/toy", ("org/toy", "main", "validation"), "hf:org/toy:main"),
        ("hf:org/toy:other", ("org/toy", "other", "validation"), "hf:org/toy:other"),
    ],
)
def test_the_hub(
    make_task: Callable[..., Task],
    monkeypatch: pytest.MonkeyPatch,
    data: str,
    asked: tuple[str, str | None, str],
    source: str,
) -> None:
    hub = FakeHub(list(ROWS))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = make_task(hub=HubSource("org/toy", "main", {"test": "validation"}))
    loaded = load_examples(task, data, "test")
    assert hub.asked == [asked]
    assert (loaded.examples, loaded.source, loaded.split) == (EXPECTED, source, "test")
    assert loaded.sha256 == load_examples(task, data, "test").sha256


def test_what_the_hub_refuses_is_passed_on(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (ConnectionError("offline"), FileNotFoundError("no data set"), ValueError("Unknown split"))
    for error in (*refused, DatasetsError("damaged")):
        monkeypatch.setitem(sys.modules, "datasets", FakeHub(error))
        with pytest.raises(UserError, match=f"hf:a/b, split 'train': {error}"):
            load_examples(task, "hf:a/b")
    monkeypatch.setitem(sys.modules, "datasets", FakeHub([{"id": "x"}]))
    with pytest.raises(UserError, match="hf:a/b:1: no column 'question' for task toy; the row has id"):
        load_examples(task, "hf:a/b")
    with pytest.raises(UserError, match="task toy has no data set on the hub"):
        load_examples(task, "hf:")


def test_missing_packages_are_named_with_their_extra(
    task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)  # import fails as if it were not installed
    needs = ((tmp_path / "x.parquet", "Parquet needs pyarrow"), ("hf:a/b", "the hub needs datasets"))
    for source, need in needs:
        with pytest.raises(UserError, match=rf'{source}: {need}: pip install -e "\.\[train\]" in'):
            load_examples(task, source)
