"""Which source files a user's task consists of, so that a run can tell that they have changed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Collection
from pathlib import Path

from sorl_env.task import Task
from sorl_env.task_file import OURS, loaded_from

_INSTALLED = ("site-packages", "dist-packages")


def own_code(task: Task, known: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of the files of a task from outside, by folder and name: those that hold its functions, and those beside
    them that were imported. Empty for a task of sorl's own.

    Args:
        known: names to look for whether they were imported by now or not: some imports happen inside functions.
    """
    owns: set[Path] = set()
    for part in (type(task), *(getattr(task, field.name) for field in dataclasses.fields(task))):
        function = part.func if isinstance(part, functools.partial) else part
        name = getattr(function, "__module__", None) or ""
        file, first = getattr(sys.modules.get(name), "__file__", None), name.partition(".")[0]
        if file is not None and first not in OURS and first not in sys.stdlib_module_names:
            owns.add(Path(file).resolve())
    hashes: dict[str, str] = {}
    for own in owns:
        folder = own.parent
        recorded = [path for path in map(folder.parent.joinpath, known) if path.is_relative_to(folder)]
        beside = [] if folder.name in _INSTALLED else loaded_from(folder).values()
        for path in filter(Path.is_file, (own, *beside, *recorded)):
            where = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            hashes[where] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(hashes.items()))
