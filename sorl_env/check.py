"""One clause of a contract as it was found, and a list of them as a command prints it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from sorl_env.errors import UserError
from sorl_env.outside import OutsideError
from sorl_env.task_file import user_files
from sorl_env.text import quoted


@dataclass(frozen=True)
class Check:
    """One clause of a contract: whether it holds, and what was seen."""

    name: str
    passed: bool
    detail: str
    tool_is_out: bool = False  # the tool could not be reached, so no episode that uses it can be checked


def describe_checks(checks: Sequence[Check], width: int) -> str:
    """A line for each check, with its name in ``width`` characters, and a last line that counts the failures."""
    states = ["ok  " if check.passed else "FAIL" for check in checks]
    lines = [f"  {state}  {one.name:<{width}}{one.detail}" for state, one in zip(states, checks, strict=True)]
    failed = sum(not check.passed for check in checks)
    summary = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    return "\n".join([*lines, summary])


def raised(error: BaseException) -> str:
    """An exception in one line: what it is, and where in the user's own files it was raised."""
    if isinstance(error, UserError):
        return str(error)
    frames, files = traceback.extract_tb(error.__traceback__), user_files()
    frame = next((one for one in reversed(frames) if one.filename in files), frames[-1] if frames else None)
    where = "" if frame is None else f" ({frame.filename}:{frame.lineno})"
    said = quoted(str(error), 200)[1:-1]
    return (
        f"{said if isinstance(error, OutsideError) else f'it raised {type(error).__name__}: {said}'}{where}"
    )
