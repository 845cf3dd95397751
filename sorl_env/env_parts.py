"""Helpers of the environment's constructor and of its reset: the toolbox, a warning, options."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sorl_env.command import add_search_options
from sorl_env.data import ExampleSet
from sorl_env.declared import place_of
from sorl_env.errors import UserError
from sorl_env.task import Task, ToolSettings
from sorl_env.task_file import user_traceback
from sorl_env.text import read_json
from sorl_env.tool import Tool, ToolLike
from sorl_env.tool_sources import close_tools, open_tools, with_description
from sorl_env.toolbox import Toolbox

logger = logging.getLogger(__name__)

TASK_HELP = "a name, package.module:TASK, a .py file, gym:ID, openenv:URL or reasoning_gym:NAME"
_ARGUMENT = "task_args."


class Equipment(NamedTuple):
    """What an environment is equipped with.

    Attributes:
        task: the task; its prompt describes the tools that the settings add.
        owned: names of the tools that were opened for this environment, and that it closes.
    """

    task: Task
    toolbox: Toolbox
    owned: frozenset[str]


def equip(
    task: Task, tools: Sequence[ToolLike] | None, settings: ToolSettings, reply_chars: int
) -> Equipment:
    """The toolbox with the task's tools, or with ``tools`` in their place, and with those that the settings add.

    Raises:
        UserError: a text names no tools, their server does not answer, or two tools share a name.
    """
    is_built = tools is None and callable(task.tools)
    named: Any = tools
    if tools is None:
        named = _build_tools(task, settings) if callable(task.tools) else task.tools
    opened: list[Tool] = []
    try:
        given = open_tools(named, settings, opened)
        added = open_tools(settings.tools, settings, opened)
        toolbox = Toolbox(
            [*given, *added],
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            max_reply_chars=reply_chars,
        )
    except (TypeError, ValueError) as error:
        close_tools(opened)
        if isinstance(error, UserError):
            raise
        raise UserError(f"task {task.name}: {error}") from error  # such as a parameter without a type hint
    if added:
        task = with_description(task, toolbox.tools[len(given) :])
    owned = frozenset(toolbox.names) if is_built else frozenset(tool.name for tool in opened)
    return Equipment(task, toolbox, owned)


def _build_tools(task: Task, settings: ToolSettings) -> Sequence[ToolLike | str]:
    assert callable(task.tools)
    name = getattr(task.tools, "__name__", repr(task.tools))
    what = f"task {task.name}: tools={name}{place_of(task.tools)}, called with the settings,"
    advice = f"return a list of tools; if {name} is a tool itself, write tools=[{name}]"
    try:
        built: object = task.tools(settings)
    except UserError:
        raise
    except Exception as error:
        if (lines := user_traceback(error)) is None:
            raise
        raise UserError(f"{what} failed; {advice}:\n{lines}") from error
    if isinstance(built, str) or not isinstance(built, Sequence):
        raise UserError(f"{what} returned {built!r}; {advice}")
    return built


def warn_of_sample(toolbox: Toolbox, task: Task, examples: ExampleSet) -> None:
    """Log a warning where real questions are searched for in an embedded sample of passages."""
    if not examples.is_sample and any(getattr(tool, "is_sample", False) for tool in toolbox.tools):
        logger.warning(
            "task %s asks questions of %s, but searches only its embedded sample of passages: give corpus= or "
            "search_url=",
            task.name,
            examples.source,
        )


def read_index_option(options: Mapping[str, Any], size: int) -> int:
    """The example number that ``reset(options={"index": i})`` asks for.

    Raises:
        UserError: there is another option, or there is no such example.
    """
    for name in options:
        if name != "index":
            raise UserError(f"reset has no option {name!r}; its only option is 'index'")
    index = options["index"]
    if not isinstance(index, (int, np.integer)) or not 0 <= index < size:
        raise UserError(f"reset: index {index!r} is outside the {size} examples, 0 to {size - 1}")
    return int(index)


def read_task_args(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the task, which a ``Parser(mappings=("task_args",))`` has read: JSON values, or else texts."""
    found: dict[str, Any] = {}
    for name, text in vars(args).items():
        if name.startswith(_ARGUMENT) and name != f"{_ARGUMENT}KEY":
            try:
                found[name.removeprefix(_ARGUMENT)] = read_json(text)
            except ValueError:
                found[name.removeprefix(_ARGUMENT)] = text
    return found


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a task, its data and what its search tool searches; see ``read_task_args``, too."""
    parser.add_argument("task", help=TASK_HELP)
    parser.add_argument("--task_args.KEY", metavar="JSON", help="an argument of the task")
    parser.add_argument("--data", help="a .jsonl(.gz) or .parquet file, a folder of them, or hf:owner/name")
    parser.add_argument("--split", default="train", help="split of the data (default: train)")
    add_search_options(parser)
