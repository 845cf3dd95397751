"""Finding an algorithm by its name, by ``package.module:NAME`` or by the path of a file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import cast, get_args

from sorl_env.errors import UserError, did_you_mean
from sorl_env.task.import_file import import_code
from sorl_train.algorithms import ALGORITHMS, Algorithm, RatioLevel, check_choice

ENTRY_POINT_GROUP = "sorl.algorithms"
# Fields of an algorithm that identify it in a run's manifest. The others describe it, or are settings, which are saved.
_FACTS = ("ratio", "advantage", "normalize", "about", "equation")


def find_algorithm(reference: str, ratio: str = "auto") -> Algorithm:
    """The algorithm that ``--algo`` names, at another ratio level unless ``ratio`` is ``auto``.

    ``reference`` is a name of ``ALGORITHMS``, the name of an entry point of the group ``sorl.algorithms``,
    ``package.module:NAME``, or the path of a ``.py`` file; without a NAME the attribute ``ALGORITHM`` is taken.
    Raises ``UserError`` if there is no such algorithm, or its file or module cannot be imported.
    """
    check_choice("ratio level", ratio, ("auto", *get_args(RatioLevel)))
    algorithm = ALGORITHMS[reference] if reference in ALGORITHMS else _from_outside(reference)
    return algorithm if ratio == "auto" else dataclasses.replace(algorithm, ratio=cast(RatioLevel, ratio))


def installed_algorithms() -> list[str]:
    """Names of the algorithms that other installed packages add; none of them is imported."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - set(ALGORITHMS))


def short_name(reference: str) -> str:
    """A name without folders, suffix and attribute: ``my_algo`` of ``path/to/my_algo.py``."""
    location, attribute = _split(reference)
    return attribute or (Path(location).stem if location.endswith(".py") else location)


def algorithm_facts(reference: str) -> dict[str, str]:
    """What identifies an algorithm from outside for a run's manifest: its row, and a hash of the file that it is in."""
    if reference in ALGORITHMS:
        return {}
    algorithm = find_algorithm(reference)
    facts = {name: str(getattr(algorithm, name)) for name in _FACTS}
    surrogate = algorithm.surrogate
    file = inspect.getsourcefile(surrogate) if callable(surrogate) else None
    facts["surrogate"] = str(algorithm.surrogate_name or getattr(surrogate, "__qualname__", "clipped"))
    facts |= {name: str(getattr(hook, "__qualname__", name)) for name, hook in algorithm.hooks.items()}
    location, _ = _split(reference)
    file = location if location.endswith(".py") else file
    digest = hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() if file else ""
    return facts | {"file_sha256": digest}


def _split(reference: str) -> tuple[str, str]:
    """Location and attribute; a colon in the path of a file belongs to the path."""
    if reference.endswith(".py"):
        return reference, ""
    location, _, attribute = reference.rpartition(":")
    return (location, attribute) if location else (reference, "")


def _from_outside(reference: str) -> Algorithm:
    location, attribute = _split(reference)
    if not (attribute or location.endswith(".py")):
        location, attribute = _split(_entry_point(reference))
    if location.endswith(".py"):
        location = str(Path(location).expanduser().resolve())
    module = _module_at(location)
    name = attribute or "ALGORITHM"
    found = getattr(module, name, None)
    if not isinstance(found, Algorithm):
        names = [key for key, value in vars(module).items() if isinstance(value, Algorithm)]
        hint = did_you_mean(name, names) if names else f"Declare one there: {name} = Algorithm(...)"
        raise UserError(f"algorithm {reference!r}: {location} has no Algorithm called {name}. {hint}")
    return found


@functools.cache
def _module_at(location: str) -> ModuleType:
    """A file is run once: settings are asked for their algorithm in many places."""
    return import_code(location, f"algorithm {location!r}")


def _entry_point(name: str) -> str:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return point.value
    raise UserError(
        f"unknown algorithm {name!r}. {did_you_mean(name, [*ALGORITHMS, *installed_algorithms()])} "
        "For an algorithm of your own give the path of a .py file or package.module:NAME."
    )
