"""What a policy writes into a tool's block: whatever it is, an observation follows, and a short one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_env import Toolbox, ToolCall, ToolRequest
from sorl_env.errors import did_you_mean

from .conftest import Call


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


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just("\ud800")
)
VALUES = st.recursive(
    SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text(st.characters()) | st.just("\ud800"), x)
)
ARGUMENTS = (
    st.dictionaries(st.sampled_from(["count", "share", "mood", "names", "more", "x"]), VALUES) | VALUES
)


@settings(max_examples=60, deadline=None)
@given(ARGUMENTS, st.booleans())
def test_no_json_value_raises_out_of_a_step(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only)
    outcome = Toolbox([lookup]).call(ToolRequest("lookup", body))
    assert isinstance(outcome, ToolCall), outcome
    json.dumps([outcome.reply, outcome.error], ensure_ascii=False).encode()


def test_a_long_name_is_not_compared_letter_by_letter() -> None:
    assert did_you_mean("serach" * 200_000, ["search"]) == "Known: search."
    outcome = Toolbox([lookup]).call(ToolRequest("l" * 1_000_000, "x"))
    assert isinstance(outcome, ToolCall) and len(outcome.reply) < 200
    outcome = Toolbox([lookup]).call(ToolRequest("lokup", "x"))
    assert isinstance(outcome, ToolCall) and outcome.error == outcome.reply
    assert outcome.reply.startswith("There is no tool 'lokup'. Did you mean 'lookup'?")
