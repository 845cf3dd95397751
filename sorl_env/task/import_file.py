"""Import Python files and modules of users, tell errors in their code from those in ours, and hash a task's files.

A user's file may import the files beside it, as a script may: its folder goes to the end of ``sys.path``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

from sorl_env.errors import UserError, no_such_file
from sorl_env.task.task import Task

FILE_PREFIX = "sorl_task_"  # of the names of modules that are imported by their path
OURS = frozenset({"sorl_env", "sorl_tasks", "sorl_tools", "sorl_train"})  # a clone of sorl may be the folder
_INSTALLED = ("site-packages", "dist-packages")
_IMPORTERS = (__file__, importlib.__file__, "<frozen importlib")
_files: set[str] = set()  # of users, as tracebacks name them
_folders: set[Path] = set()  # of those files that were imported by their path


def import_file(path: Path) -> ModuleType:
    """The module in a ``.py`` file, which may import the files beside it.

    Raises:
        UserError: there is no such file, running it fails, or another module has the name of a file beside it.
    """
    if not path.is_file():
        raise UserError(no_such_file(path, (".py",)))
    path = path.absolute()
    folder = path.parent.resolve()
    _folders.add(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    _check_neighbours(folder, path)
    # a file called datasets.py must not become everybody's datasets
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{FILE_PREFIX}{digest}_{path.stem.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    _mark_user_module(module)
    sys.modules[name] = module  # dataclasses and pickling look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error here comes from the user's file
        del sys.modules[name]
        raise _failed(str(path), error) from error
    return module


def _check_neighbours(folder: Path, file: Path) -> None:
    """Refuse an ``import`` that means a file beside ``file`` and would give another module of that name."""
    pending, seen = [file], {file.resolve()}
    while pending:
        importer = pending.pop()
        for name in _imported_names(importer):
            beside = _module_file(folder, name)
            if beside is None or beside in seen:
                continue
            seen.add(beside)
            pending += beside.parent.rglob("*.py") if beside.name == "__init__.py" else [beside]
            module = sys.modules.get(name)
            source = module or importlib.util.find_spec(name)
            found = getattr(source, "__file__" if module else "origin", None)
            if found is None or Path(found).resolve() != beside:
                raise UserError(
                    f"{importer}: 'import {name}' gives {found}, not {beside}, because one process has one module of "
                    "that name: rename the file beside the task"
                )


def _imported_names(file: Path) -> Iterator[str]:
    """The first parts of the names of the modules that a file imports, other than relatively."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # importing it will say so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _module_file(folder: Path, name: str) -> Path | None:
    """The file beside a user's that may be meant by a name; those of sorl and of Python keep their names."""
    if name in OURS or name in sys.stdlib_module_names:
        return None
    files = (folder / name / "__init__.py", folder / f"{name}.py")
    return next((file.resolve() for file in files if file.is_file()), None)


def _loaded_from(folders: Collection[Path]) -> dict[str, Path]:
    """The imported files in ``folders`` and in packages beside them, as tracebacks name them, and where they are."""
    found = {}
    for name, module in list(sys.modules.items()):
        file, first = getattr(module, "__file__", None), name.partition(".")[0]
        if name == "__main__" or first in OURS or not isinstance(file, str) or not file.endswith(".py"):
            continue  # a script there that started the process is not the task's
        path = _resolved(file)
        packages = (parent for parent in path.parents if parent.name == first)
        if path.parent in folders or any(package.parent in folders for package in packages):
            found[file] = path
    return found


@functools.cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def import_code(location: str, wanted_by: str) -> ModuleType:
    """The module in a ``.py`` file or of a name, in which errors count as the user's own.

    Args:
        wanted_by: who asked for it, for messages, as in ``task 'package.module:TASK'``.

    Raises:
        UserError: there is no such file or module, or importing it fails; the message shows its own lines.
    """
    if location.endswith(".py"):
        return import_file(Path(location).expanduser())
    try:
        module = importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{location}.".startswith(f"{error.name}."):
            raise _failed(wanted_by, error) from error  # it lacks something that it imports
        raise UserError(f"{wanted_by}: no module {error.name!r}; is it on the Python path?") from error
    except (Exception, SystemExit) as error:
        raise _failed(wanted_by, error) from error
    if location.partition(".")[0] not in OURS:
        _mark_user_module(module)
    return module


def _mark_user_module(module: ModuleType) -> None:
    if file := getattr(module, "__file__", None):
        _files.add(file)


def own_code(task: Task, known: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of the files of a task from outside, by folder and name: those that hold its functions, and those beside
    them that were imported, so that a run can tell that they have changed. Empty for a task of sorl's own.

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
        beside = [] if folder.name in _INSTALLED else _loaded_from({folder}).values()
        for path in filter(Path.is_file, (own, *beside, *recorded)):
            where = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            hashes[where] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(hashes.items()))


def user_files() -> set[str]:
    """The source files of users that were imported, as tracebacks name them."""
    return _files.union(_loaded_from(_folders))


def user_traceback(error: BaseException) -> str | None:
    """The traceback of an error, from the first line in a user's file on; None if it passes through no such file."""
    frames, files = traceback.extract_tb(error.__traceback__), user_files()
    first = next((i for i, frame in enumerate(frames) if frame.filename in files), None)
    return None if first is None else _shown(frames[first:], error)


def _failed(what: str, error: BaseException) -> UserError:
    """An error that shows where an import failed, from the imported file on."""
    if isinstance(error, SystemExit):
        return UserError(f"{what} ends Python while it is imported (sys.exit): remove that from the file")
    if isinstance(error, UserError):
        return UserError(f"{what}: {error}")
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_IMPORTERS)]
    return UserError(f"{what} cannot be imported; correct it:\n{_shown(theirs, error)}")


def _shown(frames: list[traceback.FrameSummary], error: BaseException) -> str:
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(type(error), error)]
    return "".join(lines).rstrip()
