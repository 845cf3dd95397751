"""Which source files a user's task consists of, so that a run can tell that they have changed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from pathlib import Path
from types import ModuleType

from sorl_env.neighbours import OURS, PREFIX
from sorl_env.task import Task

_INSTALLED = ("site-packages", "dist-packages")


def own_code(task: Task) -> dict[str, str]:
    """SHA-256 of the files of a task from outside, by folder and name: those that hold its functions, and those beside
    them that were imported. Empty for a task of sorl's own."""
    hashes: dict[str, str] = {}
    parts = [type(task), *(getattr(task, field.name) for field in dataclasses.fields(task))]
    for part in parts:
        function = part.func if isinstance(part, functools.partial) else part
        name = getattr(function, "__module__", None) or ""
        first, own = name.partition(".")[0], _file_of(sys.modules.get(name))
        if own is None or first in OURS or first in sys.stdlib_module_names:
            continue
        folder = own.parent
        for file in (own, *_beside(folder, first)):
            where = f"{folder.name}/{file.relative_to(folder).as_posix()}"
            hashes[where] = hashlib.sha256(file.read_bytes()).hexdigest()
    return dict(sorted(hashes.items()))


def _beside(folder: Path, package: str) -> list[Path]:
    """The files of imported modules in a folder, and in packages beside them that ``neighbours`` has found."""
    if folder.name in _INSTALLED:
        return []
    found = []
    for name, module in list(sys.modules.items()):
        file = _file_of(module)
        inside = package.startswith(PREFIX) and name.startswith(f"{package}.")
        if file is not None and (file.parent == folder or (inside and file.is_relative_to(folder))):
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
