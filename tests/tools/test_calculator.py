"""The calculator: arithmetic, and nothing but arithmetic."""

from __future__ import annotations

import ast
import contextlib
import random
import re
import subprocess
import sys
from typing import Any

import pytest

from sorl_env.tool import ToolCall, ToolInputError, ToolRequest, as_tool
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * -3", "-9"),
        ("7 / 2", "3.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 10", "1024"),
        ("2 ** 0.5", "1.41421356237"),
        ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + abs(-2)", "6"),
        ("max(3, 5, 4) - min(1, 2)", "4"),
        ("round(2.567, 1)", "2.6"),
        ("round(pi, 2)", "3.14"),
        ("  12\t* 12 ", "144"),
        ("10 ** 30", "1" + "0" * 30),
        ("1 ** 10 ** 300", "1"),
        ("(-1) ** (10 ** 300 + 1)", "-1"),
        ("0 ** 10 ** 300", "0"),
        ("round(1234, -2)", "1200"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("2 +", "Not an arithmetic expression"),
        ("", "Not an arithmetic expression"),
        ("x + 1", "Not arithmetic: x."),
        ("'a' * 3", "Not arithmetic: 'a'"),
        ("True + 1", "Not arithmetic: True."),
        ("1j", "Not arithmetic: 1j"),
        ("__import__('os').system('true')", "Not arithmetic"),
        ("[1, 2]", "Not arithmetic"),
        ("1 if 1 else 2", "Not arithmetic"),
        ("round(2.5, ndigits=1)", "Not arithmetic"),
        ("1 / 0", "No value: division by zero"),
        ("sqrt(-1)", "No value"),
        ("log(0)", "No value"),
        ("abs(1, 2)", "No value"),
        ("(-8) ** 0.5", "not a real number"),
        ("1e308 * 10", "not a real number"),
        ("10.0 ** 400", "No value"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 3000 * 10 ** 3000", "too large"),
        ("1 +\0 1", "Not"),
        ("(" * 150 + "1" + ")" * 150, "301 characters"),
        ("(" * 99 + "1" + ")" * 98, "Not an arithmetic expression"),
    ],
)
def test_refusals(expression: str, message: str) -> None:
    with pytest.raises(ToolInputError, match=re.escape(message)):
        calculator(expression)


def test_is_a_tool_of_one_text() -> None:
    tool = as_tool(calculator)
    assert tool.name == "calculator"
    assert tool.schema["required"] == ["expression"]
    outcome = Toolbox([calculator]).call(ToolRequest("calculator", "6 * 7"))
    assert isinstance(outcome, ToolCall)
    assert (outcome.reply, outcome.ok) == ("42", True)
    refused = Toolbox([calculator]).call(ToolRequest("calculator", "six"))
    assert isinstance(refused, ToolCall)
    assert (refused.ok, refused.reply) == (False, "Not arithmetic: six.")


COSTLY = """round(5, -10**8) | round(5, -(10**300)) | round(10**3000, -3001) | round(5, 10**300) | round(5.5, -10**9)
    | 2 ** 10 ** 9 | (-2) ** 10 ** 9 | 10 ** 3000 ** 2 | 7 ** 7 ** 7 ** 7"""


@pytest.mark.parametrize("expression", [*COSTLY.split(" | "), "9" * 190 + " ** 9999"])
def test_costly_operations_are_refused_before_they_run(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: Python's own operations never see operands above the limits."""
    guard_operations(monkeypatch)
    with pytest.raises(ToolInputError):
        calculator(expression)


def guard_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each operation check the size of what it is asked for, and a power the size of what it would make."""
    from sorl_tools import calculator as module

    def guard(operation: Any, makes_power: bool = False) -> Any:
        def guarded(*operands: Any) -> Any:
            for operand in operands:
                assert not isinstance(operand, int) or operand.bit_length() <= module.MAX_BITS
            if makes_power and all(isinstance(operand, int) for operand in operands) and abs(operands[0]) > 1:
                assert operands[0].bit_length() * max(operands[1], 0) <= module.MAX_BITS
            return operation(*operands)

        return guarded

    binary = {kind: guard(op, kind is ast.Pow) for kind, op in module._BINARY.items()}
    monkeypatch.setattr(module, "_BINARY", binary)
    monkeypatch.setattr(module, "_FUNCTIONS", {name: guard(op) for name, op in module._FUNCTIONS.items()})

    def guarded_round(value: Any, digits: Any = None) -> Any:
        assert digits is None or not isinstance(digits, int) or abs(digits) <= module.MAX_DIGITS
        return round(value, digits)

    monkeypatch.setattr(module, "round", guarded_round, raising=False)


ATOMS = ["9" * 40, *"0 1 -1 7 0.5 1e308 5e-324 pi 10**8 -10**8 10**300 2**9999".split()]
FORMS = "({0}+{1}) ({0}-{1}) ({0}*{1}) ({0}/{1}) ({0}//{1}) ({0}%{1}) ({0}**{1}) {0}**{1}**{2} round({0},{1})".split()
FORMS += "round({0}) log({0},{1}) log({0}) sqrt({0}) abs({0}) -{0} ({0}) max({0},{1},{2}) min({0})".split()
FORMS += ["{0}({1})", "[{0}]*{1}", "'a'*{0}", "{0}<<{1}", "{0}!", "~{0}", "(" * 60 + "{0}"]


def random_expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(ATOMS)
    return draw.choice(FORMS).format(*(random_expression(draw, depth - 1) for _ in range(3)))


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_expression_is_costly_or_raises_something_else(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard_operations(monkeypatch)
    draw = random.Random(11)
    values = 0
    for _ in range(count):
        expression = random_expression(draw, draw.randint(1, 4))
        try:
            assert len(calculator(expression)) <= 3100
            values += 1
        except ToolInputError as error:
            assert len(str(error)) < 400, expression
    assert values > count / 20


@pytest.mark.parametrize(
    "text", ["(" * 200, "-" * 199 + "1", "((" * 49 + "1" + "))" * 49, "~" * 199, "1if 1else 2", "0x", "1_0"]
)
def test_deep_and_odd_texts(text: str) -> None:
    with contextlib.suppress(ToolInputError):
        assert calculator(text)


def test_python_does_not_warn_about_expressions() -> None:
    code = "from sorl_tools.calculator import calculator; calculator('1if 1else 2')"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False
    )
    assert "invalid decimal literal" not in done.stderr.replace("Not arithmetic", "")
    assert "ToolInputError: Not arithmetic" in done.stderr
