"""Corpora of every kind, and rows that hold no passage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import Corpus, Passage, read_corpus

from ...corpora import made_up, write_jsonl, write_passages

TSV = 'id\ttext\ttitle\n1\t"""Aaron"" is a prophet,\nand a priest"\tAaron\n2\tplain text\t"God in ""Abba"""\n'
WANTED = [
    Passage("1", "Aaron", '"Aaron" is a prophet,\nand a priest'),
    Passage("2", 'God in "Abba"', "plain text"),
]


def read(*sources: Path) -> list[Passage]:
    return list(Corpus(sources).passages())


def parquet(path: Path, columns: dict[str, list[object]], group: int = 1000) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[train]'")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install -e '.[train]'")
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


@pytest.mark.parametrize("name", ["c.tsv", "c.tsv.gz"])
def test_dpr_tsv(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(TSV.encode()) if name.endswith("gz") else TSV.encode())
    assert read(path) == WANTED


def test_search_r1_and_plain_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"id": 3, "contents": "\\"Title\\"\\ntext"}\n\n{"id": "4", "text": "only\\ntext"}\n'
    )
    assert read(tmp_path / "a.jsonl") == [Passage("3", "Title", "text"), Passage("4", "", "only\ntext")]


def test_parquet_of_both_kinds(tmp_path: Path) -> None:
    one = parquet(
        tmp_path / "a.parquet", {"id": [1, 2], "title": ["T", None], "text": ["x y", "z"], "more": [0, 0]}
    )
    assert read(one) == [Passage("1", "T", "x y"), Passage("2", "", "z")]
    two = parquet(tmp_path / "b.parquet", {"id": ["a"], "contents": ['"T"\nx y']})
    assert read(two) == [Passage("a", "T", "x y")]
    three = parquet(tmp_path / "c.parquet", {"_id": ["a"], "text": ["x"]})
    assert read(three) == [Passage("a", "", "x")]


def test_texts_are_split_into_passages_of_about_100_words(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    words = [f"w{i}" for i in range(250)]
    (tmp_path / "deep" / "notes.md").write_text("\ufeff## The *real* title\n\n" + " ".join(["intro", *words]))
    (tmp_path / "a.txt").write_text("short text")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "skipped.pdf").write_text("x")
    found = read(tmp_path)
    assert found[0] == Passage("a.txt#0", "a", "short text")
    assert [p.id for p in found[1:]] == [f"deep/notes.md#{i}" for i in range(3)]
    assert {p.title for p in found[1:]} == {"The *real* title"}
    assert " ".join(p.text for p in found[1:]).endswith(" ".join(words))
    assert [len(p.text.split()) for p in found[1:]] == [85, 85, 85]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": "1", "contents": "x"}\n\n{"id": "2"}\n', r"a.jsonl:3: not a passage"),
        ("a.jsonl", '{"id": "1"\n', r"a.jsonl:1: not valid JSON"),
        ("a.jsonl", "[" * 100_000 + "\n", r"a.jsonl:1: not valid JSON \(it is nested too deeply"),
        ("a.tsv", "", r"a.tsv:1: the header must name 'text'"),
        ("a.tsv", 'id\ttext\n1\t"x\ny"\n2\n', r"a.tsv:4: 1 columns, but the header has 2"),
        ("a.tsv.gz", "id\ttext\n", r"a.tsv.gz: not a readable gzip file"),
        ("a.parquet", "nonsense", r"a.parquet: not a readable Parquet file"),
        ("a.txt", "café", r"a.txt: not UTF-8"),
        ("a.tsv", "id\ttext\n1\tcafé\n", r"a.tsv, after line \d: not TSV in UTF-8"),
        ("a.csv", "", r"cannot read this kind of corpus"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_parquet_without_text_with_an_empty_cell_and_not_in_utf8(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[train]'")
    text = pa.array([b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file \(.*utf-8"):
        read(parquet(tmp_path / "a.parquet", {"text": text}))
    with pytest.raises(UserError, match="no column 'text' or 'contents'; it has id, body"):
        read(parquet(tmp_path / "a.parquet", {"id": ["1"], "body": ["x"]}))
    with pytest.raises(UserError, match=r"b.parquet, row 2: not a passage"):
        read(parquet(tmp_path / "b.parquet", {"id": ["1", "2"], "text": ["x", None]}))


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "wiki.jsonl", made_up(1))
    with pytest.raises(UserError, match=r"Did you mean 'wiki.jsonl'\?"):
        Corpus([tmp_path / "wik.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="file in this folder"):
        Corpus([tmp_path / "empty"])


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", made_up(3))
    before = Corpus([path]).fingerprint()
    assert Corpus([path]).fingerprint() == before
    write_jsonl(path, made_up(4))
    assert Corpus([path]).fingerprint() != before


def test_half_surrogate_pairs_are_replaced(tmp_path: Path) -> None:
    """As they are in questions and in the replies of servers; a corpus of millions must not fail at one passage."""
    row = {"id": "\ud800", "contents": '"T\ud800"\ntext \ude00\ud83d \ud83d\ude00'}
    raw = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    (tmp_path / "a.jsonl").write_bytes(json.dumps(row).encode() + b"\n" + raw + b"\n")
    passage = Passage("\ufffd", "T\ufffd", "text \ufffd\ufffd \U0001f600")
    assert read(tmp_path / "a.jsonl") == [passage, passage]
    assert list(read_corpus(tmp_path / "a.jsonl")) == [passage, passage]
    assert list(write_passages([passage], tmp_path)) == [passage]
