"""The options of commands that name a task, its data and its tools."""

from __future__ import annotations

import argparse
import re
from typing import Any

from sorl_env.envs.text_env import TextEnv, open_env
from sorl_env.task.registry import load_task
from sorl_env.task.task import ToolSettings
from sorl_env.text import read_json

_ARGUMENT = "task_args."
# as YAML has them
_WORDS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)


def add_task_options(parser: argparse.ArgumentParser, *, many_splits: bool = False) -> None:
    """Add the options that ``open_named_task`` reads. The parser needs ``mappings=("task_args",)``."""
    add = parser.add_argument
    add("task", help="a name, package.module:TASK, a .py file, gym:ID, openenv:URL or reasoning_gym:NAME")
    add("--task_args.KEY", metavar="JSON", help='an argument of the task, as --task_args.hops "[1, 2]"')
    add("--data", help="a .jsonl(.gz) or .parquet file, a folder of them, or hf:owner/name")
    if many_splits:
        splits = "splits of the data (default: train test)"
        add("--split", nargs="+", default=["train", "test"], metavar="SPLIT", help=splits)
    else:
        add("--split", default="train", help="split of the data (default: train)")
    add("--search.corpus", dest="corpus", metavar="FILE", help="corpus of the search tool")
    add("--search.url", dest="search_url", metavar="URL", help="retrieval server of the search tool")
    tools = "further tools: mcp:URL or mcp:COMMAND names those of an MCP server, mcp+episode: one that keeps state"
    add("--tools", nargs="+", default=[], metavar="TEXT", help=tools)


def task_args(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the task: JSON values, ``False``, ``no`` and ``.5`` as YAML has them, or else texts."""
    found: dict[str, Any] = {}
    for name, text in vars(args).items():
        if name.startswith(_ARGUMENT) and name != f"{_ARGUMENT}KEY":
            try:
                value = read_json(text)
            except ValueError:
                value = float(text) if re.fullmatch(r"-?\.\d+", text) else _WORDS.get(text.lower(), text)
            found[name.removeprefix(_ARGUMENT)] = value
    return found


def open_named_task(args: argparse.Namespace, *splits: str, **settings: Any) -> list[TextEnv]:
    """The environment of each split of the task that the options name, with further ``ToolSettings``.

    Raises:
        UserError: there is no such task or split, or the options do not fit it.
    """
    task = load_task(args.task, **task_args(args))
    tools = ToolSettings(args.corpus, args.search_url, tools=tuple(args.tools), **settings)
    return [open_env(task, data=args.data, split=split, tool_settings=tools) for split in splits]
