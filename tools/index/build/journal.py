"""What an unfinished build has done so far, such that a killed one goes on where it was."""

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
    """One JSON record a line, written after the data that it speaks of; a torn last line counts for nothing.

    Bringing data to the disk takes a while on some disks, so records wait up to ``SYNC_S``; a kill loses so much work.

    Args:
        folder: of the build's scratch files, made if it is not there.
        header: what the build was asked for; a journal of another request is not gone on with.

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
                    f"{folder.parent}: an unfinished build is there whose {', '.join(changed)} differed; give its "
                    "command again to go on with it, or add --restart to begin anew"
                )
        else:
            self.add(wanted, now=True)

    def close(self) -> None:
        """Let another process build here; files that a failed build left open are closed as they are."""
        for data in self._files:
            data.abandon()
        self._lock.close()

    def append_to(self, path: Path, length: int) -> Appended:
        """Open a file whose first ``length`` bytes the records vouch for; it is on the disk before later records."""
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
            raise UserError(
                f"{self._path}: it is damaged ({error}); add --restart to begin the build anew"
            ) from error
        with self._path.open("r+b") as file:
            file.truncate(len(whole))
        return records

    def add(self, record: Mapping[str, Any], now: bool = False) -> None:
        """Append a record, on the disk when this returns if ``now``, and before long otherwise."""
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
        """The newest record of a stage."""
        return next((record for record in reversed(self.records) if record.get("stage") == stage), None)


def _lock(path: Path) -> BinaryIO:
    """Open a file that no other process has open this way; the system lets go of it when the process ends.

    Raises:
        BlockingIOError: another process has it.
    """
    file = path.open("ab")
    try:
        import fcntl
    except ModuleNotFoundError:
        return file  # Windows, where deleting a file that is open fails by itself
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


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

    @property
    def closed(self) -> bool:
        return self._file.closed

    def abandon(self) -> None:
        """Close the file without bringing it to the disk: no record vouches for what is new in it."""
        self._file.close()

    def sync(self) -> None:
        """Bring what was written to the disk, if that was not done when it was closed."""
        if not self.closed:
            sync(self._file)

    def close(self) -> None:
        self.sync()
        self._file.close()


def npy_header(shape: tuple[int, ...], dtype: Any) -> bytes:
    """What ``np.save`` writes before the numbers of such an array."""
    buffer = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()
