"""Which source files a user's task consists of, so that a run can tell that they have changed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType

from sorl_env.neighbours import OURS, PREFIX
from sorl_env.task import Task

_INSTALLED = ("site-packages", "dist-packages")


def own_code(task: Task, known: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of the files of a task from outside, by folder and name: those that hold its functions, and those beside
    them that were imported. Empty for a task of sorl's own.

    Args:
        known: names to look for whether they were imported by now or not: some imports happen inside functions.
    """
    hashes: dict[str, str] = {}
    loaded = {name: file for name, module in list(sys.modules.items()) if (file := _file_of(module))}
    parts = [type(task), *(getattr(task, field.name) for field in dataclasses.fields(task))]
    for part in parts:
        function = part.func if isinstance(part, functools.partial) else part
        name = getattr(function, "__module__", None) or ""
        first, own = name.partition(".")[0], loaded.get(name)
        if own is None or first in OURS or first in sys.stdlib_module_names:
            continue
        folder = own.parent
        recorded = [file for file in map(folder.parent.joinpath, known) if file.is_relative_to(folder)]
        for file in (own, *_beside(folder, first, loaded), *filter(Path.is_file, recorded)):
            where = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            hashes[where] = hashlib.sha256(file.read_bytes()).hexdigest()
    return dict(sorted(hashes.items()))


def _beside(folder: Path, package: str, loaded: Mapping[str, Path]) -> list[Path]:
    """The files of imported modules in a folder, and in packages beside them that ``neighbours`` has found.

    A script there that started the process is not the task's.
    """
    if folder.name in _INSTALLED:
        return []
    found = []
    for name, file in loaded.items():
        inside = package.startswith(PREFIX) and name.startswith(f"{package}.")
        if name != "__main__" and (file.parent == folder or (inside and file.is_relative_to(folder))):
            found.append(file)
    return found


def _file_of(module: ModuleType | None) -> Path | None:
    """The source file of a module; None if it has none."""
    name = getattr(module, "__file__", None)
    return (
        Path(name).resolve()
        if isinstance(name, str) and name.endswith(".py") and Path(name).is_file()
        else None
    )
