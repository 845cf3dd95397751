"""Reads the questions of any data file."""

from __future__ import annotations

from pathlib import Path

from sorl_env.data import read_rows
from sorl_env.errors import UserError
from sorl_env.registry import load_task
from sorl_env.task import Example
from sorl_tasks._qa import parse_qa_row
from sorl_tasks.alphamed19k import parse_row as parse_choice_row


def read_questions(path: Path, task: str | None = None) -> list[Example]:
    """All questions of a file, read by a task's ``parse_row``, or without a task by their columns.

    Raises:
        UserError: the file or a row of it cannot be read.
    """
    parse = load_task(task).parse_row if task is not None else None
    examples = []
    for where, row in read_rows(path):
        reader = parse or (parse_choice_row if row.get("options") is not None else parse_qa_row)
        try:
            examples.append(reader(row))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            problem = f"no column {error}" if isinstance(error, KeyError) else str(error)
            hint = "" if task else " --task NAME reads the columns of that task."
            raise UserError(f"{where}: {problem}.{hint}") from error
    if not examples:
        raise UserError(f"{path}: it has no rows; give another file")
    return examples
