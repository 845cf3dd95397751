"""One clause of a contract as it was found, and a list of them as a command prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
