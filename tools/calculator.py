"""Arithmetic without ``eval``: an example of a tool that is a plain function."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import TypeAlias

from sorl_env.tool import ToolInputError

Number: TypeAlias = int | float

_FILENAME = "<calculator>"  # of expressions in warnings

MAX_CHARACTERS = 200
# No operand is longer than this, so no operation is slow and the calculator may run `inline`, without a deadline.
MAX_BITS = 10_000  # an integer of about 3,000 digits
MAX_DIGITS = 400  # for `round`, before or behind the point; no float has more


def _round(value: Number, digits: int | None = None) -> Number:
    """``round`` with a limit, because rounding an integer computes 10 to the number of digits."""
    if digits is not None and not -MAX_DIGITS <= digits <= MAX_DIGITS:
        raise ToolInputError(f"round takes at most {MAX_DIGITS} digits, before or behind the point.")
    return round(value, digits)


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "log": math.log,
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": math.sqrt,
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression, for example (3 + 4) * 2.5 or sqrt(2) ** 3.

    It knows + - * / // % **, parentheses, abs, log, max, min, round, sqrt, pi and e. Floats come with 12 digits.

    Raises:
        ToolInputError: the expression is malformed, too large, or has no real value.
    """
    if (length := len(expression)) > MAX_CHARACTERS:
        raise ToolInputError(f"The expression has {length} characters, at most {MAX_CHARACTERS} are allowed.")
    try:
        expression = expression.strip()
        _silence_parser()
        value = _evaluate(ast.parse(expression, _FILENAME, mode="eval").body, expression)
    except ToolInputError:
        raise
    except SyntaxError as error:
        raise ToolInputError(f"Not an arithmetic expression: {error.msg}.") from error
    except (ArithmeticError, TypeError, ValueError) as error:  # 1/0, abs(1, 2), sqrt(-1), a null character
        raise ToolInputError(f"No value: {error}.") from error
    except (RecursionError, MemoryError) as error:  # of Python's parser, or the caller's stack is nearly full
        raise ToolInputError("Not an arithmetic expression: nested too deeply.") from error
    return f"{value:.12g}" if isinstance(value, float) else str(value)


calculator.inline = True  # type: ignore[attr-defined]  # microseconds: no thread needed


def _silence_parser() -> None:
    """Ignore warnings about such expressions as "1if 1else 2", which are refused anyway. ``warnings.catch_warnings`` is
    not thread-safe, so a filter for expressions alone is left in place; it is added again where someone has reset the
    filters."""
    if not any(getattr(module, "pattern", None) == _FILENAME for *_, module, _ in warnings.filters):
        warnings.filterwarnings("ignore", module=_FILENAME)


def _evaluate(node: ast.expr, source: str) -> Number:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand, source))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left, source), _evaluate(node.right, source)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*(_evaluate(argument, source) for argument in node.args)))
    # quote the source, because `ast.unparse` recurses with several calls per level
    raise ToolInputError(f"Not arithmetic: {ast.get_source_segment(source, node)}.")


def _check_power(base: Number, exponent: Number) -> None:
    """Refuse a huge power before it is computed; powers of 0, 1 and -1 are never huge."""
    if not isinstance(base, int) or not isinstance(exponent, int) or abs(base) <= 1:
        return
    if base.bit_length() * exponent > MAX_BITS:
        raise ToolInputError("The result is too large.")


def _bounded(value: Number | complex) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ToolInputError("The result is not a real number.")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolInputError("The result is too large.")
    return value
