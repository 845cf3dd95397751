"""Tasks by name, by ``package.module:ATTRIBUTE`` or by path; Gymnasium ids."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

from sorl_env.errors import UserError, did_you_mean
from sorl_env.task import Task

ENTRY_POINT_GROUP = "sorl.tasks"
_TASK_PACKAGE = "sorl_tasks"

# Known before any task is imported, so that `import sorl_env` stays light. Other tasks get their id when they are loaded.
_ENV_IDS = {
    "sorl/NQ-v0": "nq",
    "sorl/HotpotQA-v0": "hotpotqa",
    "sorl/AlphaMed19K-v0": "alphamed19k",
    "sorl/MiniHop-v0": "minihop",
}


def load_task(reference: str, **knobs: Any) -> Task:
    """Find a task.

    Args:
        reference: a name (a module of ``sorl_tasks``, or an entry point of the group ``sorl.tasks``),
            ``package.module:ATTRIBUTE``, or the path of a ``.py`` file.
        knobs: for tasks that are built, such as ``minihop``; a module's builder is the callable named by ``TASK`` or
            like the module.

    Raises:
        UserError: there is no such task, or it takes no such knobs.
    """
    if reference.endswith(".py"):
        module = _import_file(Path(reference).expanduser())
        task = _pick(module, None, reference, knobs)
    elif ":" in reference:
        module_name, _, attribute = reference.partition(":")
        task = _pick(_import_module(module_name, reference), attribute, reference, knobs)
    else:
        task = _load_by_name(reference, knobs)
    register_task(task)
    return task


def task_names() -> list[str]:
    """Names that ``load_task`` knows, sorted."""
    return sorted({*_packaged_names(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def register_task(task: Task) -> None:
    """Make ``gym.make(task.env_id)`` work; an id that is taken stays as it is."""
    if task.env_id is not None and task.env_id not in gymnasium.registry:
        _register(task.env_id, task)


def register_envs() -> None:
    """Register the ids of the tasks that come with the package, without importing them."""
    for env_id, name in _ENV_IDS.items():
        if env_id not in gymnasium.registry:
            _register(env_id, name)


def _register(env_id: str, task: Task | str) -> None:
    gymnasium.register(
        env_id,
        entry_point="sorl_env.env:ToolUseEnv",
        vector_entry_point="sorl_env.vector:ToolUseVectorEnv",
        kwargs={"task": task},
        order_enforce=False,  # the environment itself says so when step precedes reset
        disable_env_checker=True,  # a passive check of each step costs more than the step
    )


def _load_by_name(name: str, knobs: dict[str, Any]) -> Task:
    if name in _packaged_names():
        return _pick(importlib.import_module(f"{_TASK_PACKAGE}.{name}"), None, name, knobs)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            module_name, _, attribute = point.value.partition(":")
            return _pick(_import_module(module_name, name), attribute or None, name, knobs)
    raise UserError(
        f"there is no task {name!r}. {did_you_mean(name, task_names())} A task of your own: package.module:TASK, or the "
        "path of a .py file"
    )


def _packaged_names() -> list[str]:
    spec = importlib.util.find_spec(_TASK_PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return [module.name for module in pkgutil.iter_modules(locations) if _holds_task(module.name, locations)]


def _holds_task(name: str, locations: list[str]) -> bool:
    """A module with a ``TASK``, and not one of its helpers; read from the source, without importing it."""
    for location in locations:
        file = Path(location) / f"{name}.py"
        if not name.startswith("_") and file.is_file():
            return any(line.startswith(("TASK =", "TASK:")) for line in file.read_text(encoding="utf-8").splitlines())
    return False


def _import_module(name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something it imports is not
        raise UserError(f"task {reference!r}: there is no module {error.name!r}; is its folder on the path?") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")]
        raise UserError(f"{path}: no such file. {did_you_mean(path.name, siblings)}")
    # one module a file, under a name of its own: two files called task.py must not shadow each other
    name = f"sorl_task_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look it up
    spec.loader.exec_module(module)
    return module


def _pick(module: ModuleType, attribute: str | None, reference: str, knobs: dict[str, Any]) -> Task:
    """The module's task; with knobs, from its builder."""
    name = attribute or "TASK"
    found = getattr(module, name, None)
    if found is None and attribute is None:
        tasks = [value for value in vars(module).values() if isinstance(value, Task)]
        if len(tasks) > 1:
            raise UserError(f"task {reference!r}: {len(tasks)} tasks in one module; name one TASK, or use module:NAME")
        found = tasks[0] if tasks else None
    if found is None:
        known = [key for key, value in vars(module).items() if isinstance(value, Task)]
        raise UserError(f"task {reference!r}: {module.__name__} has no {name}. {did_you_mean(name, known)}")
    if isinstance(found, Task) and not knobs:
        return found
    builder = getattr(module, found.name, None) if isinstance(found, Task) else found
    if not callable(builder) or isinstance(builder, Task):
        raise UserError(f"task {reference!r} takes no knobs, got {', '.join(knobs)}")
    try:
        built = builder(**knobs)
    except (TypeError, ValueError) as error:  # an unknown knob, or one out of range
        raise UserError(f"task {reference!r}: {error}") from error
    if not isinstance(built, Task):
        raise UserError(f"task {reference!r}: {name} made a {type(built).__name__}, not a Task")
    return built
