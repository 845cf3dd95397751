"""Small files of a run: written whole or not at all, or appended line by line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_train.run.hashed_folder import sync


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that a reader, or a crash at any moment, sees the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        error.filename = str(path)  # what is to be written, not the file that stands in for it
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())  # mkstemp makes it private
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)  # the new name survives a power cut too


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a half last line of a killed run is left out.

    Raises:
        UserError: a whole line that is no JSON object, by its number: the file was damaged.
    """
    return [parse_line(path, number, line) for number, line in enumerate(whole_lines(path), start=1)]


def whole_lines(path: Path) -> list[bytes]:
    """The lines of ``path`` that end in a line break: a killed run may have left half a line behind them."""
    *whole, _ = path.read_bytes().split(b"\n")
    return whole


def append_line(path: Path, line: str) -> None:
    """One write call, so that a kill leaves at most one half line, at the end. A full disk raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        rest = line.encode()
        while rest:  # a disk that fills up takes a part; the next call says why
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Line ``number`` of ``path`` as a JSON object. Raises ``UserError`` where it is none."""
    try:
        value = read_json(line)
    except ValueError as error:
        raise UserError(
            f"{path}:{number}: {error}; restore the file from a copy, or delete this line"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path}:{number}: no JSON object but {type(value).__name__}; restore the file from a copy, or delete "
            "this line"
        )
    return value
