"""Folders that a command makes: if it is refused after all, none of them stays behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def missing_folders(path: Path) -> list[Path]:
    """Those of ``path`` and the folders above it that do not exist, the deepest first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty(made: Sequence[Path]) -> None:
    """Remove the folders ``made`` (the deepest first) up to the first one that holds something."""
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # it holds something, or was never made
            if folder.exists():
                return


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder and those above it; where the block raises, those of them that are still empty go again."""
    made = missing_folders(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except BaseException:
        remove_empty(made)
        raise
