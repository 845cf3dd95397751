"""Write and read trajectory files: JSONL, also gzipped, without loss in either direction.

A line holds the fields of ``Trajectory`` under their own names, and the files load with ``datasets``::

    datasets.load_dataset("json", data_files="run/trajectories/step_*.jsonl")

``datasets`` infers types from values, so a field that is empty, None or of different types in some rows would change
the schema from one file to the next. Hence mappings and tool calls are stored as strings of JSON
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
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from sorl_env.errors import UserError, did_you_mean
from sorl_env.folders import naming
from sorl_env.text import read_json
from sorl_env.tool import ToolCall
from sorl_env.trajectory import SCHEMA_VERSION, StopReason, Trajectory, Turn

_DTYPES = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "turn_ids": np.int16,
    "rollout_log_probs": np.float32,
}
# The fields of a record by name, with their annotations. SCHEMA_VERSION stands for them: a change is a new version.
_FIELDS = {field.name: field.type for field in dataclasses.fields(Trajectory)}
_TURN_FIELDS = {field.name: field.type for field in dataclasses.fields(Turn)}
_JSON_TYPES: Mapping[Any, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str,),
    "int": (int,),
    "float": (float, int),
}


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory per line, gzipped if the name ends in ``.gz``. The file appears complete or not at all.

    Raises:
        UserError: ``metadata`` holds something that JSON cannot.
    """
    path = Path(path)
    with _replacing(path) as unfinished, _open_for_writing(unfinished, path.suffix == ".gz") as stream:
        for trajectory in trajectories:
            stream.write(json.dumps(_encode(trajectory), separators=(",", ":")) + "\n")


def read_jsonl(path: str | Path) -> list[Trajectory]:
    """All trajectories of a file; see ``iter_jsonl``."""
    return list(iter_jsonl(path))


def iter_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a file, one at a time, with every dtype as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: a line is not a trajectory of this schema version; the message names file and line.
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


def _encode(trajectory: Trajectory) -> dict[str, Any]:
    record = {name: getattr(trajectory, name) for name in _FIELDS}
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
    record = {name: getattr(turn, name) for name in _TURN_FIELDS}
    record["format_error"] = turn.format_error or ""
    record["reward_items"] = _items_to_json(turn.reward_items)
    record["tool_calls"] = json.dumps([call._asdict() for call in turn.tool_calls])
    return record | {"generate_s": float(turn.generate_s), "tool_s": float(turn.tool_s)}


def _items_to_json(items: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in items.items()})


def _shortest(values: NDArray[np.float32]) -> list[float]:
    """Float32 values as the doubles with the fewest digits that round back to them, which halves the file's size."""
    shortest: list[float] = values.astype(np.float32).astype(str).astype(np.float64).tolist()
    return shortest


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = read_json(line)
    except ValueError as error:
        cut_off = "; its end is missing, so delete this last line or write the file again"
        hint = "" if line.endswith(b"\n") else cut_off
        raise UserError(f"{where}: not valid JSON ({error}){hint}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _decode(record: Mapping[str, Any], where: str) -> Trajectory:
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{where}: schema_version is {version!r}, but this version of sorl reads {SCHEMA_VERSION}: read the file "
            "with the version of sorl that wrote it"
        )
    _check_fields(record, _FIELDS, where)
    try:
        arrays: dict[str, Any] = {
            name: np.array(record[name], dtype=dtype) for name, dtype in _DTYPES.items()
        }
        converted: dict[str, Any] = {
            "turns": tuple(
                _decode_turn(turn, f"{where}: turn {i}") for i, turn in enumerate(record["turns"])
            ),
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


def _decode_turn(record: Mapping[str, Any], where: str) -> Turn:
    _check_fields(record, _TURN_FIELDS, where)
    calls = read_json(record["tool_calls"])
    for i, call in enumerate(calls):
        _check_names(call, ToolCall._fields, f"{where}: tool call {i}")
    converted: dict[str, Any] = {
        "format_error": record["format_error"] or None,
        "reward_items": read_json(record["reward_items"]),
        "tool_calls": tuple(ToolCall(**call) for call in calls),
    }
    return Turn(**(dict(record) | converted))


def _check_fields(record: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    """Refuse other fields, and a text or number that is null or has another type."""
    _check_names(record, fields, where)
    for name, annotation in fields.items():
        expected = _JSON_TYPES.get(annotation)
        value = record[name]
        if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            shown = "null" if value is None else type(value).__name__
            raise UserError(f"{where}: the field {name!r} must be {expected[0].__name__}, not {shown}")


def _check_names(record: Mapping[str, Any], expected: Collection[str], where: str) -> None:
    for name in expected:
        if name not in record:
            raise UserError(f"{where}: the field {name!r} is missing; the fields are {', '.join(record)}")
    for name in record:
        if name not in expected:
            raise UserError(f"{where}: unknown field {name!r}. {did_you_mean(name, expected)}")


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
def _open_for_writing(path: Path, compress: bool) -> Iterator[TextIO]:
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
