"""One process at a time in a folder: a lock that the system releases when its holder is gone, however it ended.

It is ``fcntl.flock``, because a child process can inherit its descriptor and hold the lock beyond its parent's death.
The package filelock hides the descriptor, and has no place for the id of the holder's process, which the message names.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from sorl_env.command import say
from sorl_env.errors import UserError
from sorl_env.folders import missing_folders, naming, remove_empty

LOCK = ".lock"  # the file in the folder: a line with id and host for each process that holds it
HELD = "SORL_LOCK"  # environment variable: the descriptor that a child process has inherited


class FolderLock:
    """Keeps other processes out of a folder within a ``with`` block, or for the life of this process and its heirs.

    Args:
        folder: it is made if it is missing, and removed at the end if nothing but the lock is in it then.
        option: the option that names the folder, for the message to those who are kept out.
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
        """Lock the folder of this name; a second time after the first was moved aside, with its lock.

        Raises:
            UserError: another process holds it, or a file stands where the folder has to be.
        """
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
            if host == socket.gethostname() and _is_alive(int(number)):
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


def _is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
