"""The journal of an unfinished build: what is done already, so that a build that was killed can continue."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_env.text import read_json

SYNC_S = 1.0


class Journal:
    """A file with one JSON record per line, written after the data that it is about. Half a last line is ignored.

    Syncing data to the disk can be slow, so records wait for up to ``SYNC_S``; a kill loses at most that much work.

    Args:
        folder: holds the build's scratch files; made if it does not exist.
        header: what the build was asked for; a journal with another header is not continued.

    Raises:
        UserError: the folder holds the journal of another request, another process builds there, or it cannot be
            written.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = folder / "journal.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder / "lock")
        except BlockingIOError as error:
            raise UserError(f"{folder.parent}: another process is building there; wait for it") from error
        except OSError as error:
            raise UserError(f"{folder.parent}: cannot be written ({error})") from error
        self._files: list[Appended] = []
        self._waiting: list[Mapping[str, Any]] = []
        self._synced = 0.0
        wanted = json.loads(json.dumps(header))
        try:
            self.records = self._read()
        except UserError:
            self._lock.close()
            (folder / "lock").unlink(missing_ok=True)
            raise
        if self.records:
            begun = self.records[0]
            changed = sorted(key for key in begun.keys() | wanted.keys() if begun.get(key) != wanted.get(key))
            if changed:
                raise UserError(
                    f"{folder.parent}: it holds an unfinished build with another {', '.join(changed)}; continue that "
                    "build with its own command, or add --restart to begin again"
                )
        else:
            self.add(wanted, now=True)

    def close(self) -> None:
        """Let other processes build here. Files that a failed build left open are closed without syncing them."""
        for data in self._files:
            data.abandon()
        self._lock.close()

    def append_to(self, path: Path, length: int) -> Appended:
        """Open a file whose first ``length`` bytes are recorded; it will be synced before any later record."""
        file = Appended(path, length)
        self._files.append(file)
        return file

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        whole = self._path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        try:
            records = [dict(read_json(line)) for line in whole.splitlines()]
        except (ValueError, TypeError) as error:
            raise UserError(f"{self._path}: it is damaged ({error}); add --restart to begin again") from error
        with self._path.open("r+b") as file:
            file.truncate(len(whole))
        return records

    def add(self, record: Mapping[str, Any], now: bool = False) -> None:
        """Append a record. It is on the disk when this returns if ``now``, and otherwise a little later."""
        self.records.append(dict(record))
        self._waiting.append(record)
        if now or time.monotonic() - self._synced >= SYNC_S:
            for data in self._files:
                data.sync()
            with self._path.open("ab") as file:
                file.write("".join(f"{json.dumps(one)}\n" for one in self._waiting).encode())
                sync(file)
            self._waiting.clear()
            self._files = [data for data in self._files if not data.closed]
            self._synced = time.monotonic()

    def last(self, stage: str) -> dict[str, Any] | None:
        """The last record of a stage, or None."""
        return next((record for record in reversed(self.records) if record.get("stage") == stage), None)


def _lock(path: Path) -> BinaryIO:
    """Open and lock a file; the system releases the lock when the process ends.

    Raises:
        BlockingIOError: another process has locked it.
    """
    file = path.open("ab")
    try:
        import fcntl
    except ModuleNotFoundError:
        return file  # on Windows an open file cannot be deleted anyway
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def sync(file: BinaryIO) -> None:
    """Make sure that everything written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


class Appended:
    """A file that grows. When it is opened, it is cut to the length that the journal has recorded.

    Raises:
        UserError: it is shorter than that.
    """

    def __init__(self, path: Path, length: int) -> None:
        path.touch()
        if path.stat().st_size < length:
            raise UserError(f"{path}: shorter than the journal says; add --restart to begin again")
        self._file = path.open("r+b")
        self._file.truncate(length)
        self._file.seek(length)
        self.length = length

    def write(self, data: bytes | npt.NDArray[Any]) -> None:
        """Append bytes, or the bytes of an array."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).tobytes()
        self.length += self._file.write(data)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def abandon(self) -> None:
        """Close the file without syncing it: no record counts on its new bytes."""
        self._file.close()

    def sync(self) -> None:
        """Sync what was written, unless the file is closed, which synced it."""
        if not self.closed:
            sync(self._file)

    def close(self) -> None:
        self.sync()
        self._file.close()


def npy_header(shape: tuple[int, ...], dtype: Any) -> bytes:
    """The header that ``np.save`` writes for such an array."""
    buffer = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()
