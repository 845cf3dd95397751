"""The options of commands that name a task, its data and what its search tool searches."""

from __future__ import annotations

import argparse
from typing import Any

from sorl_env.command import add_search_options
from sorl_env.text import read_json

TASK_HELP = "a name, package.module:TASK, a .py file, gym:ID, openenv:URL or reasoning_gym:NAME"
_ARGUMENT = "task_args."


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a task, its data and what its search tool searches; see ``read_task_args``, too."""
    parser.add_argument("task", help=TASK_HELP)
    parser.add_argument("--task_args.KEY", metavar="JSON", help="an argument of the task")
    parser.add_argument("--data", help="a .jsonl(.gz) or .parquet file, a folder of them, or hf:owner/name")
    parser.add_argument("--split", default="train", help="split of the data (default: train)")
    add_search_options(parser)


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
