"""Find tasks by name, by ``package.module:ATTRIBUTE``, by path or by family, and register their Gymnasium ids."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

from sorl_env.errors import UserError, did_you_mean, install_command
from sorl_env.task.import_file import FILE_PREFIX, import_code, user_traceback
from sorl_env.task.task import Task

ENTRY_POINT_GROUP = "sorl.tasks"
# Families of tasks: "gym:FrozenLake-v1" is what this function makes of the text after the colon. Imported when needed.
_FAMILIES = {
    "gym": "sorl_env.bridges.gym_task:gym_task",
    "openenv": "sorl_env.bridges.openenv_task:openenv_task",
    "reasoning_gym": "sorl_tasks._reasoning_gym:reasoning_gym_task",
}
_TASK_PACKAGE = "sorl_tasks"
_DECLARES_TASK = re.compile("^TASK( =|:)", re.MULTILINE)
_MEDICAL = ("medmcqa", "medqa", "medxpertqa", "mmlu_medical", "pubmedqa")  # one module declares them

# These ids are known before any task is imported, so that `import sorl_env` stays fast. Others are added on loading.
_ENV_IDS = {
    "sorl/NQ-v0": "nq",
    "sorl/HotpotQA-v0": "hotpotqa",
    "sorl/AlphaMed19K-v0": "alphamed19k",
    "sorl/MiniHop-v0": "minihop",
    "sorl/MedQA-v0": "medqa",
    "sorl/MedMCQA-v0": "medmcqa",
    "sorl/PubMedQA-v0": "pubmedqa",
    "sorl/MMLUMedical-v0": "mmlu_medical",
    "sorl/MedXpertQA-v0": "medxpertqa",
    "sorl/BioASQ-v0": "bioasq",
}
# The id for any task: gymnasium.make("sorl/Task-v0", task="path/to/task.py").
ANY_TASK_ID = "sorl/Task-v0"
_registered: dict[str, Task] = {}  # by environment id


def load_task(reference: str, **knobs: Any) -> Task:
    """Find a task.

    Args:
        reference: a name (of a task of ``sorl_tasks``, or of an entry point of the group ``sorl.tasks``),
            ``package.module:ATTRIBUTE``, the path of a ``.py`` file with or without ``:ATTRIBUTE``, an environment
            id, or one of a family: ``gym:ID``, ``openenv:URL``, ``reasoning_gym:NAME``.
        knobs: keyword arguments for a task that is built, such as ``minihop``. The function that builds it is the
            module's ``TASK``, or has the name of the task.

    Raises:
        UserError: there is no such task, or it has no such knobs.
    """
    reference = _ENV_IDS.get(reference, reference)
    if reference in _registered and not knobs:
        return _registered[reference]
    family, _, member = reference.partition(":")
    if family in _FAMILIES and member:
        return _build(functools.partial(_family(family), member), reference, knobs)
    location, attribute = reference, None
    if ".py:" in reference or not reference.endswith(".py"):
        location, _, attribute = reference.partition(":")
    if not attribute and not location.endswith(".py"):
        location, attribute = _find_by_name(reference)
    task = _pick(import_code(location, f"task {reference!r}"), attribute, reference, knobs)
    register_task(task)
    return task


def _family(name: str) -> Callable[..., Any]:
    module_name, _, function = _FAMILIES[name].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        how = install_command(f"{name.replace('_', '-')},train")
        raise UserError(f"{name} tasks need the package {error.name}: {how}") from error
    builder: Callable[..., Any] = getattr(module, function)
    return builder


def task_names() -> list[str]:
    """Names that ``load_task`` knows, sorted."""
    return sorted({*_packaged_names(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def register_task(task: Task) -> None:
    """Make ``gym.make(task.env_id)`` work. An id of a task that comes with the package cannot be taken over."""
    if task.env_id is None or task.env_id in _ENV_IDS:
        return
    _registered[task.env_id] = task
    if task.env_id not in gymnasium.registry:
        _register(task.env_id)


def register_envs() -> None:
    """Register the ids of the tasks that come with the package, without importing the tasks."""
    for env_id in (*_ENV_IDS, ANY_TASK_ID):
        if env_id not in gymnasium.registry:
            _register(env_id)


def make(task: str, **settings: Any) -> gymnasium.Env[str, str]:
    """The environment of any task: ``gymnasium.make("sorl/Task-v0", task=task, **settings)``.

    Args:
        task: see ``load_task``.
        settings: arguments of ``ToolUseEnv`` and of ``gymnasium.make``.

    Raises:
        UserError: there is no such task.
    """
    return gymnasium.make(ANY_TASK_ID, task=task, **settings)


def _register(env_id: str) -> None:
    gymnasium.register(
        env_id,
        entry_point="sorl_env.envs.tool_use:ToolUseEnv",
        # the id and not the task itself: Gymnasium makes deep copies of these, and tools may hold locks
        kwargs={} if env_id == ANY_TASK_ID else {"task": env_id},
        order_enforce=False,  # the environment itself raises ResetNeeded
        disable_env_checker=True,  # checking every step costs a good part of the step
    )


def _find_by_name(name: str) -> tuple[str, str | None]:
    """The module of a task, and the attribute that holds it, where that is known."""
    if name in _MEDICAL:
        return f"{_TASK_PACKAGE}.medical", name.upper()
    if name in _packaged_names():
        return f"{_TASK_PACKAGE}.{name}", None
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            module_name, _, attribute = point.value.partition(":")
            return module_name, attribute or None
    raise UserError(
        f"there is no task {name!r}. {did_you_mean(name, task_names())} For a task of your own give "
        "package.module:TASK or the path of a .py file; for somebody else's gym:ID, openenv:URL or reasoning_gym:NAME"
    )


def _packaged_names() -> list[str]:
    """Those of ``medical``, and modules of the task package that declare a ``TASK``, found without importing them."""
    spec = importlib.util.find_spec(_TASK_PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [file for folder in folders for file in Path(folder).glob("[!_]*.py")]
    declare = [file.stem for file in files if _DECLARES_TASK.search(file.read_text(encoding="utf-8"))]
    return [*declare, *_MEDICAL]


def _pick(module: ModuleType, attribute: str | None, reference: str, knobs: Mapping[str, Any]) -> Task:
    """The task of a module, or with knobs the one that its builder returns."""
    tasks = {name: value for name, value in vars(module).items() if isinstance(value, Task)}
    name = attribute or ("TASK" if hasattr(module, "TASK") or len(tasks) != 1 else next(iter(tasks)))
    found = getattr(module, name, None)
    if found is None:
        hint = did_you_mean(name, tasks) if tasks else f"Declare one there: {name} = Task(..)"
        where = "the file" if module.__name__.startswith(FILE_PREFIX) else module.__name__
        raise UserError(f"task {reference!r}: {where} has no {name}. {hint}")
    if isinstance(found, Task) and not knobs:
        return found
    builder = getattr(module, found.name, None) if isinstance(found, Task) else found
    if not callable(builder):
        problem = f"it has no knobs, but got {', '.join(knobs)}" if knobs else f"{name} is not a Task"
        raise UserError(f"task {reference!r}: {problem}")
    return _build(builder, reference, knobs)


def _build(builder: Callable[..., Any], reference: str, knobs: Mapping[str, Any]) -> Task:
    signature = inspect.signature(builder)
    if unknown := [knob for knob in knobs if knob not in signature.parameters]:
        hint = did_you_mean(unknown[0], signature.parameters)
        raise UserError(f"task {reference!r} has no knob {unknown[0]!r}. {hint}")
    for knob, value in knobs.items():
        usual, says = signature.parameters[knob].default, str(signature.parameters[knob].annotation)
        # a signature may allow a text beside its number
        if isinstance(usual, (int, float)) and isinstance(value, str) and "str" not in says:
            kind = "true or false" if isinstance(usual, bool) else f"a number, such as {usual}"
            raise UserError(f"task {reference!r}: {knob} should be {kind}, it is {value!r}")
    try:
        signature.bind(**knobs)
    except TypeError as error:
        given = f"is built by a function, which got {dict(knobs)}"
        raise UserError(f"task {reference!r} {given}: {error}") from error
    try:
        built = builder(**knobs)
    except ValueError as error:  # a knob out of range
        raise UserError(f"task {reference!r}: {error}") from error
    except TypeError as error:
        if not knobs or user_traceback(error):
            raise
        given = ", ".join(f"{knob}={value!r}" for knob, value in knobs.items())
        raise UserError(f"task {reference!r}: a value of {given} is of the wrong type: {error}") from error
    if not isinstance(built, Task):
        raise UserError(f"task {reference!r}: its function returned a {type(built).__name__}, not a Task")
    return built
