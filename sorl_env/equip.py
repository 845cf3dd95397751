"""The toolbox of an environment: the tools of its task, and those that the settings add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sorl_env.declared import place_of
from sorl_env.errors import UserError
from sorl_env.task import Task, ToolSettings
from sorl_env.task_file import user_traceback
from sorl_env.tool import Tool, ToolLike
from sorl_env.tool_sources import close_tools, open_tools, with_description
from sorl_env.toolbox import Toolbox


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
