"""The calculator: arithmetic, and nothing but arithmetic."""

from __future__ import annotations

import re

import pytest

from sorl_env.tool import ToolCall, ToolInputError, ToolRequest, as_tool
from sorl_env.toolbox import Toolbox
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
