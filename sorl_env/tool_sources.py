"""Tools that are named by a text, ``KIND:WHERE``, and a description of tools for prompts."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Sequence

from sorl_env.errors import UserError, did_you_mean
from sorl_env.task import Task, ToolSettings
from sorl_env.text import quoted
from sorl_env.tool import Tool, ToolLike
from sorl_env.tool_schema import takes_raw_text

# A kind, and the module whose ``open_tools(text, settings)`` returns its tools.
_KINDS = {"mcp": "sorl_tools.mcp", "mcp+episode": "sorl_tools.mcp"}


def open_tools(tools: Sequence[ToolLike | str], settings: ToolSettings, opened: list[Tool]) -> list[ToolLike]:
    """The tools, with those in place that texts name.

    ``mcp:SERVER`` names all tools of an MCP server, which is shared by all episodes; ``mcp+episode:SERVER`` gives each
    episode a connection of its own. ``SERVER`` is an ``http(s)://`` address or a command.

    Args:
        opened: the tools that a text named are added to it, also before an error; the caller has to close them.

    Raises:
        UserError: a text is of no known kind, or what it names cannot be opened.
    """
    found: list[ToolLike] = []
    for tool in tools:
        if not isinstance(tool, str):
            found.append(tool)
            continue
        kind, colon, _ = tool.partition(":")
        if not colon or kind not in _KINDS:
            hint = did_you_mean(kind, _KINDS)
            raise UserError(f"tools: {quoted(tool)} names no tools. {hint} Write mcp:URL or mcp:COMMAND")
        made: list[Tool] = importlib.import_module(_KINDS[kind]).open_tools(tool, settings)
        opened += made
        found += made
    return found


def close_tools(tools: Sequence[Tool]) -> None:
    """Close the tools that can be closed."""
    for tool in tools:
        close = getattr(tool, "close", None)
        if close is not None:
            close()


def describe_tools(tools: Sequence[Tool]) -> str:
    """What a policy has to know of tools: their tags, what to write in them, and what they do."""
    lines = []
    for tool in tools:
        properties = tool.schema["properties"]
        if takes_raw_text(tool.schema):
            inside = next(iter(properties))
        else:
            inside = "a JSON object with the schema " + json.dumps(dict(tool.schema), ensure_ascii=False)
        lines.append(
            f"<{tool.name}> {inside} </{tool.name}>: {' '.join(tool.description.split())}".rstrip(": ")
        )
    return "\n".join(lines)


def with_description(task: Task, tools: Sequence[Tool]) -> Task:
    """The task with a prompt that ends with a description of ``tools``."""
    text = f"You can also use these tools:\n{describe_tools(tools)}"
    return dataclasses.replace(task, prompt=lambda example: f"{task.prompt(example)}\n\n{text}")
