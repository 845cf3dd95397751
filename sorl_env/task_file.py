"""Import Python files and modules of users, and tell an error in their code from one in ours."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from sorl_env import neighbours
from sorl_env.errors import UserError, no_such_file
from sorl_env.neighbours import FILES, file_spec

_IMPORTERS = (__file__, neighbours.__file__, importlib.__file__, "<frozen importlib")


def import_file(path: Path) -> ModuleType:
    """The module in a ``.py`` file, which may import the files beside it (see ``neighbours``).

    Raises:
        UserError: there is no such file, or running it fails; the message shows the file's own lines.
    """
    if not path.is_file():
        raise UserError(no_such_file(path, (".py",)))
    spec = file_spec(path)
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look it up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error here comes from the user's file
        del sys.modules[spec.name]
        raise _failed(str(path), error) from error
    return module


def import_module(name: str, wanted_by: str) -> ModuleType:
    """The module ``name``; ``wanted_by`` says in messages who asked for it, as in ``task 'package.module:TASK'``.

    Raises:
        UserError: there is no such module, or importing it fails; the message shows the module's own lines.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(wanted_by, error) from error  # it lacks something that it imports
        raise UserError(f"{wanted_by}: no module {error.name!r}; is it on the Python path?") from error
    except (Exception, SystemExit) as error:
        raise _failed(wanted_by, error) from error
    return module


def remember(module: ModuleType) -> None:
    """Count errors in this module as the user's own (see `their_lines`)."""
    if file := getattr(module, "__file__", None):
        FILES.add(file)


def their_lines(error: BaseException) -> str | None:
    """The traceback of an error, from the first line in a user's file on; None if it passes through no such file."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename in FILES), None)
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
