"""Write and read trajectory files, JSONL (also gzipped) and Parquet, without loss in either direction.

Both hold the same records, the fields of ``Trajectory`` under their own names, and both load with ``datasets``::

    datasets.load_dataset("json", data_files="run/trajectories/step_*.jsonl")
    datasets.load_dataset("parquet", data_files="steps.parquet")

Arrow infers types from values, so a field that is empty, None or of different types in some rows would change the
schema from one file to the next. Hence mappings and tool calls are stored as strings of JSON
(``json.loads(row["reward_items"])``), and None as the empty string.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from sorl_env.errors import UserError, did_you_mean
from sorl_env.folders import naming
from sorl_env.text import read_json
from sorl_env.tool import ToolCall
from sorl_env.trajectory import SCHEMA_VERSION, StopReason, Trajectory, Turn

_PARQUET_BATCH = 64  # trajectories held in memory at a time
_DTYPES = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "turn_ids": np.int16,
    "rollout_log_probs": np.float32,
}

# The columns that SCHEMA_VERSION stands for, and Arrow's names of their types. A change here is a new version.
_TURN_COLUMNS = {
    "index": "int64",
    "text": "string",
    "kind": "string",
    "content": "string",
    "format_error": "string",  # empty: None
    "observation": "string",
    "reward_items": "string",  # JSON
    "tool_calls": "string",  # JSON
    "start": "int64",
    "end": "int64",
    "policy_version": "int64",
    "generate_s": "float64",
    "tool_s": "float64",
}
_COLUMNS = {
    "id": "string",
    "group_id": "string",
    "task": "string",
    "source": "string",
    "split": "string",
    "example_id": "string",
    "prompt": "string",
    "token_ids": "list of int32",
    "action_mask": "list of bool",
    "turn_ids": "list of int16",
    "rollout_log_probs": "list of float32",
    "turns": "list of turns",
    "reward": "float64",
    "reward_items": "string",  # JSON
    "stop_reason": "string",
    "seed": "int64",
    "error": "string",  # empty: None
    "metadata": "string",  # JSON
    "schema_version": "int64",
}
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {"string": (str,), "int64": (int,), "float64": (float, int)}
_CALL_FIELDS = tuple(field.name for field in dataclasses.fields(ToolCall))
# Fields of a tool call that older files lack, with the version that added them; such files get the defaults.
_CALL_FIELDS_SINCE = {"cut_from": 2}
_OLDEST_READ = 1


# --- files ----------------------------------------------------------------------------------------
def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory per line, gzipped if the name ends in ``.gz``. The file appears complete or not at all.

    Raises:
        UserError: ``metadata`` holds something that JSON cannot.
    """
    path = Path(path)
    with (
        _replacing(path) as unfinished,
        _open_for_writing(unfinished, compress=path.suffix == ".gz") as stream,
    ):
        for trajectory in trajectories:
            stream.write(json.dumps(_encode(trajectory), separators=(",", ":")) + "\n")


def read_jsonl(path: str | Path) -> list[Trajectory]:
    """All trajectories of a file; see ``iter_jsonl``."""
    return list(iter_jsonl(path))


def iter_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a file, one at a time, with every dtype as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: a line is not a trajectory of a known schema version; the message names file and line.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    with opener(path, "rb") as stream:
        try:
            for number, line in enumerate(stream, start=1):
                where = f"{path}:{number}"
                if line.strip():
                    yield _decode(_parse_line(line, where), where)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            where = f"{path}:{number + 1}"
            raise UserError(f"{where}: the gzip stream is broken ({error}); was it cut off?") from error


def write_parquet(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a Parquet file; all such files have the same schema. It appears complete or not at all.

    Raises:
        UserError: pyarrow is missing, or ``metadata`` holds something that JSON cannot.
    """
    pa, parquet = _pyarrow()
    schema = _arrow_schema(pa)
    path = Path(path)
    with (
        _replacing(path) as unfinished,
        parquet.ParquetWriter(unfinished, schema, compression="zstd") as writer,
    ):
        records = map(_encode, trajectories)
        while batch := list(islice(records, _PARQUET_BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def read_parquet(path: str | Path) -> list[Trajectory]:
    """All trajectories of a file, with every dtype as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: pyarrow is missing, the file is not Parquet, or a row is not a trajectory of a known schema version.
    """
    pa, parquet = _pyarrow()
    path = Path(path)
    try:
        file = parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}") from error
    found: list[Trajectory] = []
    with file:
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
            names = [name for name in batch.schema.names if name not in _DTYPES]
            for i, record in enumerate(batch.select(names).to_pylist()):
                # arrays are taken as they are, without making Python objects of their values
                for name in _DTYPES.keys() & set(batch.schema.names):
                    record[name] = batch.column(name)[i].values.to_numpy(zero_copy_only=False)
                found.append(_decode(record, f"{path}: row {len(found) + 1}"))
    return found


# --- records --------------------------------------------------------------------------------------
def _encode(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as plain values, which both JSON and Arrow hold exactly."""
    record = {name: getattr(trajectory, name) for name in _COLUMNS}
    record |= {name: getattr(trajectory, name).tolist() for name in _DTYPES}
    record["rollout_log_probs"] = _shortest(trajectory.rollout_log_probs)
    record["turns"] = [_encode_turn(turn) for turn in trajectory.turns]
    record["reward"] = float(trajectory.reward)
    record["reward_items"] = _items_to_json(trajectory.reward_items)
    record["stop_reason"] = trajectory.stop_reason.value
    record["error"] = trajectory.error or ""
    try:
        record["metadata"] = json.dumps(dict(trajectory.metadata))
    except TypeError as error:
        raise UserError(f"trajectory {trajectory.id}: metadata must hold JSON values: {error}") from error
    return record


def _encode_turn(turn: Turn) -> dict[str, Any]:
    record = {name: getattr(turn, name) for name in _TURN_COLUMNS}
    record["format_error"] = turn.format_error or ""
    record["reward_items"] = _items_to_json(turn.reward_items)
    record["tool_calls"] = json.dumps([dataclasses.asdict(call) for call in turn.tool_calls])
    return record | {"generate_s": float(turn.generate_s), "tool_s": float(turn.tool_s)}


def _items_to_json(items: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in items.items()})


def _shortest(values: NDArray[np.float32]) -> list[float]:
    """Float32 values as the doubles with the fewest digits that round back to them, which halves the file's size."""
    shortest: list[float] = values.astype(np.float32).astype(str).astype(np.float64).tolist()
    return shortest


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    cut_off = (
        ""
        if line.endswith(b"\n")
        else "; its end is missing, so delete this last line or write the file again"
    )
    try:
        record = read_json(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}){cut_off}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _decode(record: Mapping[str, Any], where: str) -> Trajectory:
    version = record.get("schema_version")
    if type(version) is not int or not _OLDEST_READ <= version <= SCHEMA_VERSION:
        raise UserError(
            f"{where}: schema_version is {version!r}, but this version of sorl reads {_OLDEST_READ} to "
            f"{SCHEMA_VERSION}: read the file with the version of sorl that wrote it"
        )
    _check_names(record, _COLUMNS, where)
    _check_types(record, _COLUMNS, where)
    try:
        arrays: dict[str, Any] = {
            name: np.array(record[name], dtype=dtype) for name, dtype in _DTYPES.items()
        }
        turns = tuple(
            _decode_turn(turn, version, f"{where}: turn {i}") for i, turn in enumerate(record["turns"])
        )
        converted: dict[str, Any] = {
            "turns": turns,
            "schema_version": SCHEMA_VERSION,
            "reward_items": read_json(record["reward_items"]),
            "stop_reason": StopReason(record["stop_reason"]),
            "error": record["error"] or None,
            "metadata": read_json(record["metadata"]),
        }
        return Trajectory(**(dict(record) | arrays | converted))
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: {error}") from error


def _decode_turn(record: Mapping[str, Any], version: int, where: str) -> Turn:
    _check_names(record, _TURN_COLUMNS, where)
    _check_types(record, _TURN_COLUMNS, where)
    calls = read_json(record["tool_calls"])
    fields = [name for name in _CALL_FIELDS if _CALL_FIELDS_SINCE.get(name, 1) <= version]
    for i, call in enumerate(calls):
        _check_names(call, fields, f"{where}: tool call {i}")
    converted: dict[str, Any] = {
        "format_error": record["format_error"] or None,
        "reward_items": read_json(record["reward_items"]),
        "tool_calls": tuple(ToolCall(**call) for call in calls),
    }
    return Turn(**(dict(record) | converted))


def _check_names(record: Mapping[str, Any], expected: Collection[str], where: str) -> None:
    for name in expected:
        if name not in record:
            raise UserError(f"{where}: the field {name!r} is missing; the fields are {', '.join(record)}")
    for name in record:
        if name not in expected:
            raise UserError(f"{where}: unknown field {name!r}. {did_you_mean(name, expected)}")


def _check_types(record: Mapping[str, Any], columns: Mapping[str, str], where: str) -> None:
    """Refuse a text or number that is null or has another type. Lists are checked when arrays are made of them."""
    for name, alias in columns.items():
        expected = _PYTHON_TYPES.get(alias)
        value = record[name]
        if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            shown = "null" if value is None else type(value).__name__
            raise UserError(f"{where}: the field {name!r} must be {alias}, not {shown}")


# --- plumbing -------------------------------------------------------------------------------------
def _arrow_schema(pa: Any) -> Any:
    turn = pa.struct([(name, pa.type_for_alias(alias)) for name, alias in _TURN_COLUMNS.items()])

    def type_of(alias: str) -> Any:
        element = alias.removeprefix("list of ")
        inner = turn if element == "turns" else pa.type_for_alias(element)
        return inner if element == alias else pa.list_(inner)

    return pa.schema([(name, type_of(alias)) for name, alias in _COLUMNS.items()])


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow: pip install 'sorl[train]', or use .jsonl") from error
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to. It is renamed to ``path`` if the block succeeds, and removed if it raises."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with naming(path):
            yield unfinished
            with unfinished.open("rb+") as stream:
                os.fsync(stream.fileno())
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_for_writing(path: Path, *, compress: bool) -> Iterator[TextIO]:
    if not compress:
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            yield stream
        return
    # without a name and a time in the header, the same trajectories give the same bytes
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as stream,
    ):
        yield stream
