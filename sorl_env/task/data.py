"""Load a task's examples from a local file or folder, a Hugging Face data set, or the task's embedded examples."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError, did_you_mean, install_command, no_such_file
from sorl_env.outside import place_of
from sorl_env.task.task import Example, ExampleError, Task
from sorl_env.text import read_json

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
TEST_SPLIT = "test"
_HUB = "hf:"
_warned: set[str] = set()


@dataclass(frozen=True)
class ExampleSet:
    """Examples and where they came from.

    Attributes:
        source: ``embedded``, a file's path, or ``hf:owner/name``.
        sha256: hash of the file's bytes; where there is no file, of the examples themselves.
        is_sample: these are an embedded sample that stands in for a benchmark.
        is_test: a row's column ``split`` is ``test``; see `sorl_train.rollout.environments.refuse_test_questions`.
    """

    examples: Sequence[Example]
    source: str
    split: str
    sha256: str
    is_sample: bool = False
    is_test: bool = False

    def __len__(self) -> int:
        return len(self.examples)


def load_examples(task: Task, data: str | Path | None = None, split: str = "train") -> ExampleSet:
    """Load a split of a task's examples.

    Args:
        data: None for the embedded examples; the path of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file (``split``
            is then only a label), or of a folder that holds ``{split}.jsonl`` or another of these kinds;
            ``hf:owner/name[:config]``; or ``hf:`` for the task's own data set on the Hugging Face hub.

    Raises:
        UserError: the source is missing or empty, a row cannot be read, or a row belongs to a test split although
            ``split`` is ``train``.
    """
    if data is None:
        loaded = _load_embedded(task, split)
    elif str(data).startswith(_HUB):
        loaded = _load_hub(task, str(data), split)
    else:
        path = _find_file(Path(data).expanduser(), split)
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        loaded = _parse_rows(task, _read_rows(path, content), str(path), split, digest)
    if not loaded.examples:
        raise UserError(f"{loaded.source}: split {split!r} of task {task.name} has no examples")
    return loaded


def _load_embedded(task: Task, split: str) -> ExampleSet:
    if task.embedded is None:
        raise UserError(
            f"task {task.name} has no examples of its own: give --data (data= in Python) a .jsonl, .jsonl.gz or "
            ".parquet file, a folder of them, or hf:owner/name"
        )
    if task.embedded_is_sample and task.name not in _warned:
        _warned.add(task.name)
        logger.warning(
            "task %s uses its embedded sample, which is not the benchmark: give --data (data= in Python) for "
            "real questions",
            task.name,
        )
    where = f"task {task.name}: its embedded examples{place_of(task.embedded)}"
    try:
        examples = tuple(task.embedded(split))
    except ExampleError as error:
        raise UserError(f"{where}: {error}") from error
    for one in examples:
        if not isinstance(one, Example):
            raise UserError(f"{where}: there is {one!r} among them; return a list of Example(..)")
    return ExampleSet(examples, "embedded", split, _hash_examples(examples), task.embedded_is_sample)


def _hash_examples(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        try:
            text = json.dumps(vars(example), sort_keys=True, ensure_ascii=False)
        except TypeError as error:
            raise UserError(f"example {example.id!r}: its metadata must hold JSON values: {error}") from error
        digest.update(text.encode("utf-8", "surrogatepass"))  # an author's metadata may hold lone surrogates
        digest.update(b"\n")
    return digest.hexdigest()


def read_rows(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, each with its place (``file:line``).

    Raises ``UserError`` if there is no such file, it is of another kind, or a row cannot be read.
    """
    found = _find_file(Path(path).expanduser(), "train")
    for number, row in _read_rows(found, found.read_bytes()):
        yield f"{found}:{number}", row


def _find_file(path: Path, split: str) -> Path:
    """The file itself, or the file of the split in a folder."""
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: cannot read this kind of file; use {', '.join(SUFFIXES)}")
        return path
    if path.is_dir():
        for suffix in SUFFIXES:
            candidate = path / f"{split}{suffix}"
            if candidate.is_file():
                return candidate
        names = [file.name.partition(".")[0] for file in path.iterdir() if file.name.endswith(SUFFIXES)]
        raise UserError(f"{path}: no split {split!r} ({', '.join(SUFFIXES)}). {did_you_mean(split, names)}")
    raise UserError(no_such_file(path, what="file or folder"))


def _read_rows(path: Path, content: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their line numbers (JSONL) or row numbers (Parquet), counted from 1."""
    if path.name.endswith(".parquet"):
        yield from enumerate(_read_parquet(path, content), start=1)
        return
    if path.name.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: not a readable gzip file ({error})") from error
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a row must be a JSON object, not {type(row).__name__}")
        yield number, row


def _read_parquet(path: Path, content: bytes) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow.parquet
        from pyarrow.lib import ArrowException
    except ModuleNotFoundError as error:
        raise UserError(f"{path}: Parquet needs pyarrow: {install_command('train')}") from error
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(content))
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error
    try:
        yield from table.to_pylist()
    except UnicodeDecodeError as error:  # Arrow checks the bytes of a text only when it makes a Python string
        raise UserError(f"{path}: a text is not UTF-8 ({error})") from error


def _load_hub(task: Task, reference: str, split: str) -> ExampleSet:
    name, _, config = reference[len(_HUB) :].partition(":")
    splits: Mapping[str, str] = {}
    if task.hub is not None and name in ("", task.hub.path):
        name, config, splits = task.hub.path, config or task.hub.config or "", task.hub.splits
    if not name:
        raise UserError(f"task {task.name} has no data set on the hub: give hf:owner/name[:config]")
    source = f"{_HUB}{name}" + (f":{config}" if config else "")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"{source}: the hub needs datasets: {install_command('train')}") from error
    try:
        rows = datasets.load_dataset(name, config or None, split=splits.get(split, split))
    # unreachable, unknown name, unknown configuration or split, damaged
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{source}, split {split!r}: {error}") from error
    return _parse_rows(task, enumerate(rows, start=1), source, split)


def _parse_rows(
    task: Task, rows: Iterable[tuple[int, Mapping[str, Any]]], source: str, split: str, sha256: str = ""
) -> ExampleSet:
    examples, is_test = [], False
    for number, row in rows:
        is_test = is_test or row.get("split") == TEST_SPLIT
        if split == "train" and is_test:
            raise UserError(
                f"{source}:{number}: this is a test question (column 'split' is 'test'); training on it is refused. "
                "Choose another split or file, or evaluate with split=test (--split test)"
            )
        try:
            example: object = task.parse_row(row)
        except KeyError as error:
            raise UserError(
                f"{source}:{number}: no column {error} for task {task.name}; the row has {', '.join(row) or 'none'}"
            ) from error
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise UserError(f"{source}:{number}: not a row of task {task.name}: {error}") from error
        if not isinstance(example, Example):
            what = f"task {task.name}: its parse_row{place_of(task.parse_row)} returned {example!r}"
            raise UserError(f"{what} for {source}:{number}; return an Example(..)")
        examples.append(example)
    return ExampleSet(tuple(examples), source, split, sha256 or _hash_examples(examples), is_test=is_test)
