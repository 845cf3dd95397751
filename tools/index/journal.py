"""What an unfinished build has done so far, such that a killed one goes on where it was."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError


class Journal:
    """One JSON record a line, each written after the data that it speaks of; a torn last line counts for nothing.

    Args:
        folder: of the build's scratch files, made if it is not there.
        header: what the build was asked for; a journal of another request is not gone on with.

    Raises:
        UserError: the folder holds the journal of another request, or cannot be written.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = folder / "journal.jsonl"
        wanted = json.loads(json.dumps(header))
        self.records = self._read()
        if self.records:
            begun = self.records[0]
            changed = sorted(key for key in begun.keys() | wanted.keys() if begun.get(key) != wanted.get(key))
            if changed:
                raise UserError(
                    f"{folder.parent}: an unfinished build is there whose {', '.join(changed)} differed; give its "
                    "command again to go on with it, or add --restart to begin anew"
                )
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{folder.parent}: cannot be written ({error})") from error
            self.add(wanted)

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        whole = self._path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        with self._path.open("r+b") as file:
            file.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is on the disk when this returns."""
        with self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            sync(file)
        self.records.append(dict(record))

    def last(self, stage: str) -> dict[str, Any] | None:
        """The newest record of a stage."""
        return next((record for record in reversed(self.records) if record.get("stage") == stage), None)


def sync(file: BinaryIO) -> None:
    """Bring what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


class Appended:
    """A file that grows, cut to the length that the journal vouches for when it is opened.

    Raises:
        UserError: it is shorter than that.
    """

    def __init__(self, path: Path, length: int) -> None:
        path.touch()
        if path.stat().st_size < length:
            raise UserError(f"{path}: shorter than the build's journal says; add --restart to begin anew")
        self._file = path.open("r+b")
        self._file.truncate(length)
        self._file.seek(length)
        self.length = length

    def write(self, data: bytes | npt.NDArray[Any]) -> None:
        """Append bytes, or an array's bytes."""
        raw = (
            np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
            if isinstance(data, np.ndarray)
            else data
        )
        self.length += self._file.write(raw)

    def sync(self) -> None:
        sync(self._file)

    def close(self) -> None:
        self._file.close()


def npy_header(shape: tuple[int, ...], dtype: Any) -> bytes:
    """What ``np.save`` writes before the numbers of such an array."""
    buffer = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()
