"""Passages, and corpora of several file formats, which are read row by row."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import mmap
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast, overload

import numpy as np

from sorl_env.errors import UserError, no_such_file
from sorl_env.text import read_json, valid_text
from sorl_env.tool import ToolReply

SUFFIXES = (".jsonl", ".jsonl.gz")
NO_PASSAGES = "No passages found."
WORDS_A_PASSAGE = 100
ROW_BATCH = 1024

Row = TypeVar("Row")


@dataclass(frozen=True)
class Passage:
    """A piece of text with a title, which is empty where the corpus has none."""

    id: str
    title: str
    text: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Passage:
        r"""A passage from ``{"id": .., "contents": "\"Title\"\ntext"}``, the schema of Search-R1's corpora and servers.

        Rows with ``text``, and perhaps a ``title``, are read as well. ``id`` is a text, a whole number, or missing.
        Raises ``KeyError`` if there is neither ``contents`` nor ``text``, and ``TypeError`` if a column is null or of
        another type; the message names the column and the value.
        """
        name = row.get("id")
        if name is not None and (not isinstance(name, (str, int)) or isinstance(name, bool)):
            raise TypeError(f"'id' is {_shown(name)}, which is neither a text nor a whole number")
        passage_id = "" if name is None else str(name)
        if "contents" not in row:
            title = "" if row.get("title") is None else _text(row, "title")
            return cls(passage_id, _one_line(title), _one_line(_text(row, "text")))
        title, newline, text = _text(row, "contents").partition("\n")
        if not newline:
            title, text = "", title
        title = title.strip()
        if len(title) > 1 and title[0] == title[-1] == '"':
            title = title[1:-1]
        return cls(passage_id, title, _one_line(text))


def _one_line(text: str) -> str:
    """A reply has a line for each passage, and ``contents`` has its title in the first."""
    return " ".join(text.split("\n"))


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise TypeError(f"{column!r} is {_shown(value)}, not a text")
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)[:60]


def format_passages(passages: Sequence[Passage]) -> ToolReply:
    """The reply of a search: a line ``Doc 1 (Title): text`` for each passage, best first."""
    lines = [
        f"Doc {rank} ({passage.title}): {passage.text}" if passage.title else f"Doc {rank}: {passage.text}"
        for rank, passage in enumerate(passages, start=1)
    ]
    return ToolReply("\n".join(lines) or NO_PASSAGES, hits=len(passages))


def read_corpus(path: Path) -> Iterator[Passage]:
    """The passages of a ``.jsonl`` or ``.jsonl.gz`` file. Raises ``UserError`` if there is no such file, it is of
    another kind, or a line is not a passage (named by file and line)."""
    check_corpus(path)
    with name_damage(path), open_bytes(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse_passage(lambda row: Passage.from_row(read_json(row)), line, f"{path}:{number}")


def check_corpus(path: Path) -> None:
    """Raise UserError unless the file exists and its name ends like that of a corpus."""
    if not path.is_file():
        raise UserError(no_such_file(path, SUFFIXES, "corpus"))
    if not path.name.endswith(SUFFIXES):
        raise UserError(
            f"{path}: cannot read this kind of corpus; use {' or '.join(SUFFIXES)}, or the folder that "
            "sorl-index build makes"
        )


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, unzipping it if its name ends in ``.gz``."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Turn the errors of reading a damaged file into ``UserError``."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not a readable gzip file ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def parse_passage(read: Callable[[Row], Passage], row: Row, where: str) -> Passage:
    """``read(row)`` with its texts made valid. If it fails, a ``UserError`` names the row's place in the corpus."""
    try:
        passage = read(row)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where}: not a passage: it must be an object with 'id' and 'contents', or with 'text' and perhaps "
            f"'title', all of them texts ({type(error).__name__}: {error})"
        ) from error
    return Passage(valid_text(passage.id), valid_text(passage.title), valid_text(passage.text))


class Corpus:
    """A corpus: files and folders that hold passages. ``sources`` are files (.jsonl, .tsv, .parquet, .txt, .md; the
    first two also .gz), or folders of them, whose files are read in the order of their paths. Raises ``UserError`` if a
    source does not exist, is of another kind, or is a folder without such files."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.sources = [source.expanduser() for source in sources]
        # each file with the name that its passages' ids begin with
        self.files = [(path, name) for source in self.sources for path, name in _files(source)]

    def passages(self) -> Iterator[Passage]:
        """All passages, file by file. Raises ``UserError`` if a row is not a passage; the message names file and line
        (Parquet: row)."""
        for path, name in self.files:
            with name_damage(path):
                yield from _READERS[_kind(path)](path, name)

    def fingerprint(self) -> str:
        """A hash of the files' paths, sizes and times. An interrupted build continues only if it is unchanged."""
        stats = [(path, path.stat()) for path, _ in self.files]
        facts = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _kind(path: Path) -> str:
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return suffix if suffix in _READERS else ""


def _files(source: Path) -> list[tuple[Path, str]]:
    if source.is_dir():
        found = [path for path in sorted(source.rglob("*")) if path.is_file() and _kind(path)]
        if not found:
            raise UserError(f"{source}: there is no .jsonl, .tsv, .parquet, .txt, .md file in this folder")
        return [(path, path.relative_to(source).as_posix()) for path in found]
    if not source.is_file():
        raise UserError(no_such_file(source, what="corpus"))
    if not _kind(source):
        raise UserError(
            f"{source}: cannot read this kind of corpus; use .jsonl or .tsv (or either with .gz), .parquet, .txt, "
            ".md, or a folder of them"
        )
    return [(source, source.name)]


def _read_tsv(path: Path, name: str) -> Iterator[Passage]:
    """Tab-separated rows below a header with ``id``, ``text``, ``title`` in any order, as DPR's ``psgs_w100.tsv``."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(text, delimiter="\t")
        try:
            header = next(rows, [])
            if "text" not in header and "contents" not in header:
                raise UserError(f"{path}:1: the header must name 'text' (and 'id', 'title'), not {header}")
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if len(row) != len(header):
                    raise UserError(f"{where}: {len(row)} columns, but the header has {len(header)}")
                yield parse_passage(Passage.from_row, dict(zip(header, row, strict=True)), where)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, after line {rows.line_num}: not TSV in UTF-8 ({error})") from error


def _read_parquet(path: Path, name: str) -> Iterator[Passage]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error

    number = 0
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in ("id", "_id", "title", "text", "contents") if name in names]
        if not {"text", "contents"} & set(columns):
            raise UserError(f"{path}: no column 'text' or 'contents'; it has {', '.join(names)}")
        for batch in file.iter_batches(ROW_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield parse_passage(_from_columns, row, f"{path}, row {number}")
    except (pa.ArrowException, UnicodeDecodeError) as error:  # UnicodeDecodeError: a text is not UTF-8
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error


def _from_columns(row: Mapping[str, Any]) -> Passage:
    filled = {"id": row.get("_id")} | {key: value for key, value in row.items() if value is not None}
    return Passage.from_row(filled)


def _read_text(path: Path, name: str) -> Iterator[Passage]:
    """Passages of about 100 words. Their title is the first heading of a Markdown file, or else the file's name."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error})") from error
    heads = (line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#"))
    title = next(filter(None, heads), path.stem) if path.suffix == ".md" else path.stem
    words = text.split()
    parts = max(1, round(len(words) / WORDS_A_PASSAGE)) if words else 0
    for part in range(parts):  # parts of equal length, so that the last one is not much shorter
        start, end = part * len(words) // parts, (part + 1) * len(words) // parts
        yield Passage(f"{name}#{part}", title, " ".join(words[start:end]))


_READERS: dict[str, Callable[[Path, str], Iterator[Passage]]] = {
    ".jsonl": lambda path, name: read_corpus(path),
    ".jsonl.gz": lambda path, name: read_corpus(path),
    ".tsv": _read_tsv,
    ".tsv.gz": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
    ".md": _read_text,
}


class PassageFile(Sequence[Passage]):
    """Passages in a memory-mapped file: reading one takes a page of memory, not the corpus. Threads may share it.
    ``passages.jsonl`` holds a `line` for each passage; ``offsets.npy`` holds where they begin and the last one ends."""

    def __init__(self, folder: Path) -> None:
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self._offsets = np.asarray(offsets)  # (passages + 1,); slicing a plain array is faster than a memmap
        with (folder / "passages.jsonl").open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole = self._offsets.ndim == 1 and len(offsets) and (offsets[0], offsets[-1]) == (0, len(self._map))
        if not whole or (np.diff(self._offsets) <= 0).any():
            raise ValueError("offsets of other passages")

    @staticmethod
    def line(passage: Passage) -> bytes:
        """The line of the file that stores a passage."""
        fields = [passage.id, passage.title, passage.text]
        return json.dumps(fields, ensure_ascii=False).encode() + b"\n"

    def close(self) -> None:
        """Close the file."""
        self._map.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"passage {index} of {len(self)}")
        index %= len(self)
        return Passage(*json.loads(self._map[self._offsets[index] : self._offsets[index + 1]]))
