"""Read corpora of several file formats row by row."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError, no_such_file
from sorl_tools.corpus import Passage, name_damage, open_bytes, parse_passage, read_corpus

WORDS_A_PASSAGE = 100
ROW_BATCH = 1024


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
    """The key in ``_READERS`` of a file's reader; ``""`` if it has none."""
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
    """The passage of a row, in which an empty cell counts as a column that is not there."""
    filled = {"id": row.get("_id")} | {key: value for key, value in row.items() if value is not None}
    return Passage.from_row(filled)


def _read_text(path: Path, name: str) -> Iterator[Passage]:
    """Passages of about 100 words. Their title is the first heading of a Markdown file, or else the file's name."""
    try:
        text = path.read_text(encoding="utf-8")
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
