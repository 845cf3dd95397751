"""Functions as tools: their names and schemas, and what a policy may write as their arguments.

Whatever it is, an observation follows, and a short one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Optional

import pytest

from sorl_env import Tool, Toolbox, ToolCall, ToolRequest, as_tool
from sorl_env.errors import did_you_mean
from sorl_env.tool.schema import check_schema, find_problem, schema_of, takes_raw_text

from .conftest import Call


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
    def variadic(*queries: str) -> str: ...

    def exotic(query: bytes) -> str: ...

    async def later(query: str) -> str: ...

    def answer(text: str) -> str: ...
    def unknown(text: str) -> Somewhere: ...  # type: ignore[name-defined]  # noqa: F821

    for function, problem in (
        (variadic, "cannot be passed by name"),
        (exotic, "exotic: query: no JSON schema for <class 'bytes'>"),
        (later, "later is a coroutine: give an object"),
        (object(), "is not a tool: give a function"),
        (lambda query: query, "parameter 'query' needs a type hint"),
        (eval, "no signature|no type hints|needs a type hint|cannot be passed by name"),
        (unknown, "unknown: a type hint cannot be read.*Somewhere.*outside of TYPE_CHECKING"),
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
    typed = {"type": "object", "properties": {"a": {"type": "text"}}}
    for broken in ({"type": "array"}, {"type": "object"}, typed):
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


def lookup(
    count: int,
    share: float = 0.5,
    mood: Literal["calm", 1] = "calm",
    names: list[str] | None = None,
    more: dict | None = None,
) -> str:
    """Take arguments of every type."""
    assert type(count) is int and abs(count) < 2**63 and type(mood) in (str, int)
    assert all(isinstance(name, str) for name in names or ())
    return json.dumps([count, share, mood, names, more], allow_nan=False)


lookup.inline = True  # type: ignore[attr-defined]

DEEP = "[" * 200 + "]" * 200
EXTREMES = [
    ("", "The request is not a JSON object: Expecting value"),
    ("[" * 100_000, "The request is not a JSON object: it is nested too deeply. Parameters: count, share"),
    (f'{{"count": 1, "more": {{"a": {DEEP}}}}}', "The request is not a JSON object: it is nested too deeply"),
    ("9" * 5000, "The request is not a JSON object: Exceeds the limit (4300 digits)"),
    ('{"count": %s}' % ("9" * 4000), "fit the tool: an integer is beyond 9223372036854775807."),
    ('{"count": 1, "more": {"a": [-%s]}}' % 2**70, "fit the tool: an integer is beyond 9223372036854775807."),
    ('{"count": 1, "share": NaN}', "fit the tool: a number is not finite."),
    ('{"count": 1, "share": 1e999}', "fit the tool: a number is not finite."),
    ('{"count": 1, "more": {"a": [-Infinity]}}', "fit the tool: a number is not finite."),
    ('{"count": 1, "mood": true}', "fit the tool: arguments.mood must be one of 'calm', 1."),
    ('{"count": 1, "mood": 1.0}', "fit the tool: arguments.mood must be one of 'calm', 1."),
    ('{"count": 1, "mood": {"a": []}}', "fit the tool: arguments.mood must be one of 'calm', 1."),
    ('{"count": 1, "%s": 2}' % ("k" * 1_000_000), "fit the tool: arguments have no parameter 'kkkkk"),
    ('{"count": "%s"}' % ("v" * 1_000_000), "fit the tool: arguments.count must be integer, not str."),
    ('{"count": 1, "count": null}', "fit the tool: arguments.count must be integer, not NoneType."),
    ('{"count": 1, "self": 2}', "fit the tool: arguments have no parameter 'self'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "problem"), EXTREMES, ids=[problem[-30:] for _, problem in EXTREMES])
def test_extreme_arguments_are_observations(call: Call, body: str, problem: str) -> None:
    outcome = call(Toolbox([lookup]), ToolRequest("lookup", body))
    assert isinstance(outcome, ToolCall) and not outcome.ok
    assert problem in outcome.reply and len(outcome.reply) < 400
    assert (outcome.error, outcome.attempts) == (outcome.reply, 0)


class Plain:
    """A tool object with a schema written by hand, which requires nothing and forbids nothing."""

    name = "plain"
    description = ""
    schema: Mapping[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
    inline = True

    def __call__(self, a: str, b: Any = None) -> str:
        return f"{a}{b}"


class Open(Plain):
    schema: Mapping[str, Any] = {**Plain.schema, "additionalProperties": True}

    def __call__(self, a: str, **more: Any) -> str:  # type: ignore[override]
        return f"{a}{sorted(more)}"


@pytest.mark.parametrize(
    ("tool", "body", "said"),
    [
        (Plain(), '{"a": "x", "b": {}}', "x{}"),
        (Plain(), '{"b": 1}', "fit the tool: missing a required argument: 'a'."),
        (Plain(), '{"a": "x", "c": 1}', "fit the tool: arguments have no parameter 'c'; there are 'a', 'b'."),
        (Open(), '{"a": "x", "c": 1}', "x['c']"),
    ],
)
def test_a_schema_by_hand_does_not_let_a_policy_break_the_call(tool: Any, body: str, said: str) -> None:
    outcome = Toolbox([tool]).call(ToolRequest("plain", body))
    assert isinstance(outcome, ToolCall) and said in outcome.reply


def test_a_long_name_is_not_compared_letter_by_letter() -> None:
    assert did_you_mean("serach" * 200_000, ["search"]) == "Known: search."
    outcome = Toolbox([lookup]).call(ToolRequest("l" * 1_000_000, "x"))
    assert isinstance(outcome, ToolCall) and len(outcome.reply) < 200
    outcome = Toolbox([lookup]).call(ToolRequest("lokup", "x"))
    assert isinstance(outcome, ToolCall) and outcome.error == outcome.reply
    assert outcome.reply.startswith("There is no tool 'lokup'. Did you mean 'lookup'?")
