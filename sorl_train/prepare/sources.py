"""Reads rows as they were published: from a file, a folder, or a Hugging Face data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.task import Example
from sorl_env.task.data import SUFFIXES, read_rows
from sorl_env.text import read_json
from sorl_tasks._qa import parse_qa_row
from sorl_tasks.alphamed19k import parse_row as parse_choice_row

_HUB = "hf:"


@dataclass(frozen=True)
class Source:
    """The rows of one published split, each with the place where it is, for messages.

    ``name`` is the file's, or ``hf:owner/name:config``; it goes into the manifest, so it is never a path. ``split`` is
    the publisher's name, empty for a file. The hash is of the file's bytes, or of the rows where there is no one file.
    """

    name: str
    split: str
    sha256: str
    rows: Sequence[tuple[str, Mapping[str, Any]]]


def is_file(reference: str) -> bool:
    """Whether a reference names a single file, whose split must then be given."""
    return not reference.startswith(_HUB) and not Path(reference).expanduser().is_dir()


def read_source(
    reference: str, split: str, configs: Sequence[str | None] = (None,), revision: str | None = None
) -> Source:
    """Read one published split, by the publisher's name of it.

    ``reference`` is a ``.jsonl``, ``.jsonl.gz``, ``.parquet`` or ``.json`` file (a list of rows, or an object with one
    list of rows), whose split is not asked for; a folder that holds ``{split}.jsonl`` and the like, or a copy of a hub
    data set; ``hf:owner/name`` or ``hf:owner/name:config``. If it names no config, all of ``configs`` are read. Raises
    ``UserError`` if the source does not exist or cannot be read.
    """
    if reference.startswith(_HUB):
        name, _, config = reference[len(_HUB) :].partition(":")
        return _load(name, f"{_HUB}{name}", (config,) if config else configs, split, revision)
    path = Path(reference).expanduser()
    if path.is_dir():
        for suffix in SUFFIXES:
            if (path / f"{split}{suffix}").is_file():
                return _read_file(path / f"{split}{suffix}")
        return _load(str(path), path.resolve().name, configs, split, None)
    return _read_file(path)


def _read_file(path: Path) -> Source:
    rows = tuple(_read_json(path) if path.name.endswith(".json") and path.is_file() else read_rows(path))
    return Source(path.name, "", hashlib.sha256(path.read_bytes()).hexdigest(), rows)


def _read_json(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A JSON list of rows, or an object with one such list, as BioASQ's ``{"questions": [..]}``."""
    try:
        content = read_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); it must be a list of rows") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise UserError(f"{path}: an object with {len(lists)} lists; it must have one list of rows")
        content = lists[0]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(f"{path}: it must be a list of JSON objects")
    for number, row in enumerate(content, start=1):
        yield f"{path}:{number}", row


def _load(name: str, label: str, configs: Sequence[str | None], split: str, revision: str | None) -> Source:
    import datasets

    rows, digest = [], hashlib.sha256()
    for config in configs:
        where = f"{label}:{config}" if config else label
        try:
            loaded = datasets.load_dataset(name, config, split=split, revision=revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            hint = "" if Path(name).is_dir() else " Offline? Give --source a copy: a folder or a file."
            raise UserError(f"{where}, split {split!r}: {error}{hint}") from error
        for number, row in enumerate(loaded, start=1):
            rows.append((f"{where}/{split}:{number}", row))
            text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
            digest.update(text.encode() + b"\n")
    named = [config for config in configs if config]
    full = label + (f":{'+'.join(named)}" if named else "") + (f"@{revision}" if revision else "")
    return Source(full, split, digest.hexdigest(), rows)


def read_questions(path: Path) -> list[Example]:
    """All questions of a file, read by their columns. Raises ``UserError`` if it or a row of it cannot be read."""
    examples = []
    for where, row in read_rows(path):
        reader = parse_choice_row if row.get("options") is not None else parse_qa_row
        try:
            examples.append(read_example(reader, row))
        except ValueError as error:
            raise UserError(f"{where}: {error}; give a file that sorl-data prepared") from error
    if not examples:
        raise UserError(f"{path}: it has no rows; give another file")
    return examples


def read_example(parse: Callable[[Mapping[str, Any]], Example], row: Mapping[str, Any]) -> Example:
    """A row as an example. Raises ``ValueError`` for whatever is wrong with it."""
    try:
        return parse(row)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"no column {error}" if isinstance(error, KeyError) else str(error)) from error
