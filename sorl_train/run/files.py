"""Small files of a run: written whole or not at all, or appended line by line."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.folders import naming
from sorl_env.text import read_json


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that a reader sees the old or the new content and never a part, even after a crash."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with naming(path):
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)  # so that the new name survives a power cut


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def free_name(path: Path) -> Path:
    """``path`` itself if nothing has that name; else ``path-2``, ``path-3``, .., the first name that is free."""
    name, number = path, 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}-{number}")
    return name


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a log file, one a line; the half last line that a killed run may have left is skipped.

    Raises:
        UserError: a whole line is not a JSON object, so the file was damaged; the message says which line.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    return [_parse_line(path, number, line) for number, line in enumerate(lines, start=1)]


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = read_json(line)
        if not isinstance(value, dict):
            raise ValueError(f"not a JSON object but {type(value).__name__}")
    except ValueError as error:
        raise UserError(
            f"{path}:{number}: {error}; restore the file from a copy, or delete this line"
        ) from error
    return value


def read_own_file(path: Path) -> bytes:
    """The bytes of a file that sorl wrote. Raises ``UserError`` if it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: restore it from a copy") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from error


def read_own_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that sorl wrote. Raises ``UserError`` if it is missing or damaged."""
    try:
        content = read_json(read_own_file(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (it is not a JSON object): restore it from a copy")
    return content


def append_line(path: Path, line: str) -> None:
    """Append a line with one write call, so that a kill leaves at most a half line at the end. A full disk raises
    ``OSError``."""
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            rest = line.encode()
            while rest:  # a disk that fills up takes only a part; the next call raises the error
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
