"""Functions as tools: names, schemas, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Optional

import pytest

from sorl_env import Tool, Toolbox, ToolRequest, as_tool
from sorl_env.tool.schema import check_schema, find_problem, schema_of, takes_raw_text


def search(query: str) -> str:
    """Find passages."""
    return f"about {query}"


def weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    at: Optional[float] = None,  # noqa: UP045  the older spelling works too
    tags: list[str] | None = None,
) -> str:
    """Tell the weather.

    More than one line.
    """
    return f"{city} {days} {unit} {at} {tags}"


def test_a_function_becomes_a_tool() -> None:
    tool = as_tool(search)
    assert isinstance(tool, Tool)
    assert (tool.name, tool.description) == ("search", "Find passages.")
    assert tool.schema == {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    }
    assert tool("x") == "about x"
    assert as_tool(tool) is tool


def test_schema_from_type_hints() -> None:
    schema = schema_of(weather)
    assert schema["required"] == ["city"]
    assert schema["properties"] == {
        "city": {"type": "string"},
        "days": {"type": "integer", "default": 1},
        "unit": {"enum": ["C", "F"], "default": "C"},
        "at": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "tags": {
            "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
            "default": None,
        },
    }


def test_signatures_without_usable_types_are_refused() -> None:
    def variadic(*queries: str) -> str:
        return ""

    def exotic(query: bytes) -> str:
        return ""

    async def later(query: str) -> str:
        return ""

    def answer(text: str) -> str:
        return text

    for function, problem in (
        (variadic, "cannot be passed by name"),
        (exotic, "exotic: query: no JSON schema for <class 'bytes'>"),
        (later, "later is a coroutine: give an object"),
        (object(), "is not a tool: give a function"),
        (lambda query: query, "parameter 'query' needs a type hint"),
        (eval, "no signature|no type hints|needs a type hint|cannot be passed by name"),
    ):
        with pytest.raises((TypeError, ValueError), match=problem):
            as_tool(function)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cannot be named 'answer'.*information, think are reserved"):
        as_tool(answer)


WEATHER = schema_of(weather)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"city": "Oslo"}, None),
        ({"city": "Oslo", "days": 3, "unit": "F", "at": 1, "tags": ["a", "b"]}, None),
        ({"city": "Oslo", "at": None}, None),
        ([], "arguments must be object, not list"),
        ({}, "arguments lack 'city'"),
        (
            {"city": "Oslo", "day": 1},
            "arguments have no parameter 'day'; there are 'city', 'days', 'unit', 'at', 'tags'",
        ),
        ({"city": 1}, "arguments.city must be string, not int"),
        ({"city": "Oslo", "days": 1.5}, "arguments.days must be integer, not float"),
        ({"city": "Oslo", "days": True}, "arguments.days must be integer, not bool"),
        ({"city": "Oslo", "unit": "K"}, "arguments.unit must be one of 'C', 'F'"),
        ({"city": "Oslo", "at": "noon"}, "arguments.at must be number or null"),
        ({"city": "Oslo", "tags": ["a", 1]}, "arguments.tags must be array or null"),
    ],
)
def test_what_the_policy_is_told(arguments: Any, problem: str | None) -> None:
    assert find_problem(arguments, WEATHER) == problem


def test_hand_written_schemas() -> None:
    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "k": {"type": "integer", "minimum": 1, "maximum": 5},
            "xs": {"type": "array", "items": {"type": "number"}},
            "on": {"type": "boolean"},
            "more": {"type": "object"},
        },
    }
    check_schema(schema, "tool t")
    assert find_problem({"k": 5, "xs": [1, 2.5], "on": True, "more": {"a": 1}, "free": "x"}, schema) is None
    assert find_problem({"k": 0}, schema) == "arguments.k must be at least 1"
    assert find_problem({"k": 6}, schema) == "arguments.k must be at most 5"
    assert find_problem({"xs": [1, "2"]}, schema) == "arguments.xs[1] must be number, not str"
    assert find_problem({"on": 1}, schema) == "arguments.on must be boolean, not int"
    for broken in (
        {"type": "array"},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "text"}}},
    ):
        with pytest.raises(ValueError, match="tool t: "):
            check_schema(broken, "tool t")


def test_one_free_text_parameter_takes_the_body_as_it_is() -> None:
    def pick(unit: Literal["C", "F"]) -> str:
        return unit

    assert takes_raw_text(schema_of(search))
    assert not takes_raw_text(schema_of(weather))
    assert not takes_raw_text(schema_of(pick))
    box = Toolbox([search, weather, pick])
    assert reply(box, "search", '{"query": "x"}') == 'about {"query": "x"}'
    assert reply(box, "weather", '{"city": "Oslo", "days": 2}') == "Oslo 2 C None None"
    assert reply(box, "pick", '{"unit": "F"}') == "F"


def reply(box: Toolbox, tool: str, argument: str) -> str:
    call = box.call(ToolRequest(tool, argument))
    assert not isinstance(call, Exception) and call.ok, call
    return call.reply
