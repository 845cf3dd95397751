"""Small files of a run, written whole or not at all, or appended line by line; and the lock of a folder.

The lock is ``fcntl.flock``, which the system releases when its holder is gone: a child process can inherit its
descriptor and hold the lock beyond its parent's death. The package filelock hides the descriptor, and has no place for
the id of the holder's process, which the message names.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import psutil

from sorl_env.commands.command import say
from sorl_env.errors import UserError
from sorl_env.folders import missing_folders, naming, remove_empty, replacing
from sorl_env.text import read_json


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write ``path`` so that a reader sees the old or the new content and never a part, even after a crash."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)
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
    path = path if path.name.strip(".") else path.resolve()  # the working folder has no other name to add to
    while name.exists():
        number += 1
        name = path.parent / f"{path.name}-{number}"
    return name


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a log file, one a line; none if there is no file. The half last line that a killed run may
    have left is skipped. Raises ``UserError``, which names the line, if a whole one is not a JSON object."""
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
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


LOCK = ".lock"  # the file in the folder: a line with id and host for each process that holds it
HELD = "SORL_LOCK"  # environment variable: the descriptor that a child process has inherited


class FolderLock:
    """Keeps other processes out of a folder within a ``with`` block, or for the life of this process and its heirs.

    The folder is made if it is missing, and removed at the end if nothing but the lock is in it then. ``option`` names
    it in the message to those who are kept out.
    """

    def __init__(self, folder: Path, option: str) -> None:
        self.folder, self._option = folder, option
        self._made: list[Path] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        with suppress(UserError, OSError):  # an heir or a successor holds it, or the disk is full
            self.take()
            (self.folder / LOCK).unlink()  # whoever has opened it by now notices, and makes a new one
            self._file.close()
            remove_empty(self._made)

    @property
    def descriptor(self) -> int:
        """What a child process has to inherit (``pass_fds``) so that it holds the lock, too."""
        assert self._file is not None
        return self._file.fileno()

    def take(self) -> None:
        """Lock the folder of this name; a second time after the first was moved aside, with its lock. Raises
        ``UserError`` if another process holds it, or a file stands where the folder has to be."""
        check_place(self.folder, self._option)
        file = self._open_and_lock()
        while not self._is_in_place(file):  # its holder has ended, or has moved the folder aside
            file.close()
            file = self._open_and_lock()
        if self._file is not None:
            self._file.close()
        self._file = file
        with naming(self.folder / LOCK):
            file.truncate(0)
            _sign(file.fileno())

    def _open_and_lock(self) -> BinaryIO:
        self._made = self._made or missing_folders(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = (self.folder / LOCK).open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise UserError(self._in_use(file)) from None
        except OSError as error:
            if self._file is None:  # said once
                why = f"its file system has no locks ({error.strerror}): use it from one process at a time"
                say("sorl", f"{self.folder}: {why}")
        return file

    def _is_in_place(self, file: BinaryIO) -> bool:
        """Whether the lock of the folder of this name is still this file."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self.folder / LOCK).stat())
        except FileNotFoundError:
            return False

    def _in_use(self, file: BinaryIO) -> str:
        file.seek(0)
        holders = re.findall(r"^(\d+) (\S+)$", file.read().decode(errors="replace"), re.MULTILINE)
        who, end = " on ".join(["another process", *(host for _, host in holders[:1])]), "end it"
        for number, host in reversed(holders):
            if host == socket.gethostname() and psutil.pid_exists(int(number)):
                who, end = f"process {number}", f"end it (kill -INT {number})"
        return f"{self.folder} is in use by {who}: wait until it has ended, {end}, or give another {self._option}"


def check_place(folder: Path, option: str) -> None:
    """Raise ``UserError`` if a file stands where a folder, which ``option`` names, or one above it has to be."""
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise UserError(f"{option} {folder}: {part} is a file; choose another {option}")


def join_lock() -> None:
    """In a child process: hold the lock that the parent has handed down, and no further process with it."""
    descriptor = int(os.environ.pop(HELD, "-1"))
    if descriptor >= 0:
        os.set_inheritable(descriptor, False)
        _sign(descriptor)


def _sign(descriptor: int) -> None:
    os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
