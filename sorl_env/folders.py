"""Folders: where built things are kept, and how those that a refused command has made are removed again."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def missing_folders(path: Path) -> list[Path]:
    """Of ``path`` and the folders above it, those that do not exist, the deepest first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(made: Sequence[Path]) -> None:
    """Remove the folders ``made`` (the deepest first) until one holds something."""
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # it holds something, or was never made
            if folder.exists():
                return


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder and those above it. If the block raises, the new folders that are still empty are removed."""
    made = missing_folders(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except BaseException:
        remove_empty(made)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system in the block names this path: that of a write names none, so a user could not know which
    disk is full, and a temporary name tells a user nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to. It becomes ``path`` if the block succeeds and is removed if it raises, so that a reader sees
    the old or the new content and never a part, even after a crash."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with naming(path):
            yield unfinished
            with unfinished.open("rb+") as stream:
                os.fsync(stream.fileno())
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where built things are kept: ``$SORL_CACHE``, or else ``sorl`` in the user's cache folder."""
    if os.environ.get("SORL_CACHE"):
        return Path(os.environ["SORL_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sorl"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "sorl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sorl"
