"""A user's file may import the files beside it, as a script may; each folder has its own.

Python would look for ``helper`` on ``sys.path`` and keep one module of that name for the whole process. Then two tasks
whose folders both have a ``helper.py`` would share the first one, and a task called ``datasets.py`` would become
everybody's ``datasets``. So each folder is a package of its own here, and only the files in it see what is beside them.
The standard library keeps its names.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "sorl_task_"
FILES: set[str] = set()  # imported files of users, as tracebacks name them
OURS = frozenset({"sorl_env", "sorl_tasks", "sorl_tools", "sorl_train"})  # a clone of sorl may be the folder
_folders: dict[str, Path] = {}  # by name of the package


def file_spec(path: Path) -> ModuleSpec:
    """What ``import`` needs to run a file as a module of its folder's package."""
    package = _package(path.resolve().parent)
    return _spec(f"{package}.{path.stem.replace('.', '_')}", path.absolute(), package)


def _package(folder: Path) -> str:
    """The name of the folder's package, which is made if there is none."""
    name = PREFIX + hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    _folders[name] = folder
    if name not in sys.modules:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder)]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return name


def _spec(name: str, file: Path, package: str) -> ModuleSpec:
    inside = [str(file.parent)] if file.name == "__init__.py" else None
    loader = _Loader(name, str(file), package)
    spec = importlib.util.spec_from_file_location(
        name, file, loader=loader, submodule_search_locations=inside
    )
    assert spec is not None, file  # always so with a loader
    FILES.add(str(spec.origin))
    return spec


class _Finder(MetaPathFinder):
    """Finds the modules of these packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, inside = name.partition(".")
        if package not in _folders or not inside:
            return None
        for folder in path or ():
            if file := _module_file(Path(folder), name.rpartition(".")[2]):
                return _spec(name, file, package)
        return None


class _Loader(SourceFileLoader):
    """Runs a module whose ``import`` looks beside it first."""

    def __init__(self, name: str, path: str, package: str) -> None:
        super().__init__(name, path)
        self._package = package

    def exec_module(self, module: ModuleType) -> None:
        own = {"__import__": functools.partial(_import, self._package)}
        vars(module)["__builtins__"] = {**vars(builtins), **own}
        super().exec_module(module)


def _import(
    package: str, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    """``__import__`` as the modules of a package see it."""
    first = name.partition(".")[0]
    if level or not _is_neighbour(package, first, (globals or {}).get("__name__")):
        return builtins.__import__(name, globals, locals, fromlist, level)
    found = builtins.__import__(f"{_package(_folders[package])}.{name}", globals, locals, fromlist)
    return found if fromlist else sys.modules[f"{package}.{first}"]


def _is_neighbour(package: str, name: str, importer: str | None) -> bool:
    if f"{package}.{name}" == importer or name in OURS or name in sys.stdlib_module_names:
        return False
    if f"{package}.{name}" in sys.modules:
        return True
    file = _module_file(_folders[package], name)
    if file is None:
        return False
    try:
        usual = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        usual = None
    # what Python finds there by itself is one module for everybody
    return usual is None or usual.origin is None or Path(usual.origin).resolve() != file.resolve()


def _module_file(folder: Path, name: str) -> Path | None:
    files = (folder / name / "__init__.py", folder / f"{name}.py")
    return next((file for file in files if file.is_file()), None)
