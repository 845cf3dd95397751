"""The tools of an environment: those of its task, and those that the settings add."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence
from typing import Any

from sorl_env.errors import UserError
from sorl_env.outside import place_of
from sorl_env.task.import_file import user_traceback
from sorl_env.task.task import Task, ToolSettings
from sorl_env.text import quoted
from sorl_env.tool.schema import takes_raw_text
from sorl_env.tool.tool import Tool, ToolLike
from sorl_env.tool.toolbox import Toolbox


def equip(
    task: Task, tools: Sequence[ToolLike] | None, settings: ToolSettings, reply_chars: int
) -> tuple[Task, Toolbox, frozenset[str]]:
    """The task, its toolbox, and the names of the tools that were opened here and that the environment has to close.

    The toolbox holds the task's tools, or ``tools`` in their place, and those that the settings add, which the prompt
    of the returned task describes. A text in place of a tool names all tools of an MCP server, by its ``http(s)://``
    address or its command: ``mcp:SERVER`` is shared by all episodes, ``mcp+episode:SERVER`` is opened for each of them.

    Raises:
        UserError: a text names no tools, their server does not answer, or two tools share a name.
    """
    is_built = tools is None and callable(task.tools)
    named: Any = tools
    if tools is None:
        named = _build_tools(task, settings) if callable(task.tools) else task.tools
    opened: list[Tool] = []  # the tools that a text named
    try:
        given, added = (_open_tools(one, settings, opened) for one in (named, settings.tools))
        toolbox = Toolbox(
            [*given, *added],
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            max_reply_chars=reply_chars,
        )
    except (TypeError, ValueError) as error:
        for tool in opened:
            getattr(tool, "close", lambda: None)()
        if isinstance(error, UserError):
            raise
        raise UserError(f"task {task.name}: {error}") from error  # such as a parameter without a type hint
    if added:
        about = f"You can also use these tools:\n{_description(toolbox.tools[len(given) :])}"
        ask = task.prompt
        task = dataclasses.replace(task, prompt=lambda example: f"{ask(example)}\n\n{about}")
    owned = frozenset(toolbox.names) if is_built else frozenset(tool.name for tool in opened)
    return task, toolbox, owned


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


def _open_tools(
    tools: Sequence[ToolLike | str], settings: ToolSettings, opened: list[Tool]
) -> list[ToolLike]:
    """The tools, with those in place that texts name; these are added to ``opened``, also before an error."""
    found: list[ToolLike] = []
    for tool in tools:
        if not isinstance(tool, str):
            found.append(tool)
            continue
        if not tool.startswith(("mcp:", "mcp+episode:")):
            raise UserError(f"tools: {quoted(tool)} names no tools: write mcp:URL or mcp:COMMAND")
        made: list[Tool] = importlib.import_module("sorl_tools.mcp").open_tools(tool, settings)
        opened += made
        found += made
    return found


def _description(tools: Sequence[Tool]) -> str:
    lines = []
    for tool in tools:
        inside = next(iter(tool.schema["properties"]), "")
        if not takes_raw_text(tool.schema):
            inside = "a JSON object with the schema " + json.dumps(dict(tool.schema), ensure_ascii=False)
        about = " ".join(tool.description.split())
        lines.append(f"<{tool.name}> {inside} </{tool.name}>: {about}".rstrip(": "))
    return "\n".join(lines)
