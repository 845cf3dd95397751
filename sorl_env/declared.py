"""Ask the functions that a task declares, and check what they give.

A mistake there is the author's: its message names the task, the function with its file and line, and what to write.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from sorl_env.errors import UserError
from sorl_env.outside import call_outside
from sorl_env.text import quoted, valid_text


def place_of(function: Any) -> str:
    """Where a function stands, as `` (file:line)``; empty where that is unknown."""
    inner = inspect.unwrap(getattr(function, "func", function))  # of a functools.partial
    code = getattr(inner, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def ask_for_prompt(task: str, prompt: Callable[..., Any], *arguments: Any) -> str:
    """The text of a prompt.

    Raises:
        UserError: it is no text.
    """
    text = call_outside(prompt, *arguments)
    if not isinstance(text, str):
        raise UserError(f"task {task}: its prompt{place_of(prompt)} returned {_said(text)}; return a text")
    return valid_text(text)


def ask_for_items(task: str, reward: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """The items of a reward.

    Raises:
        UserError: they are no mapping of names to finite numbers. NaN would make the loss of a whole batch NaN.
    """
    items: Any = call_outside(reward, *arguments)
    # the plain types come first: asking an abstract class takes several times as long, and each episode ends here
    wrong = None if isinstance(items, (dict, Mapping)) else _said(items)
    for name, value in () if wrong else items.items():
        if not isinstance(name, str) or not isinstance(value, (float, int, numbers.Real)):
            wrong = f"{_said(name)}: {_said(value)} among its items"
        elif not math.isfinite(value):
            where = f"task {task}: its reward{place_of(reward)}"
            raise UserError(f"{where} gave item {name!r} as {value}; it must be finite")
    if wrong:
        where = f"task {task}: its reward{place_of(reward)}"
        raise UserError(f"{where} returned {wrong}; return {{name: number}}, as {{'exact_match': 1.0}}")
    # a number of NumPy cannot be written as JSON
    return {name: value if type(value) in (float, int) else float(value) for name, value in items.items()}


def _said(value: Any) -> str:
    return "None" if value is None else f"{quoted(repr(value))[1:-1]} ({type(value).__name__})"
