"""The turn format of a model's own chat template: a message that calls one tool, or is the answer.

A template writes calls in one of the forms of ``SYNTAXES``:

========  =========================================================================  ===================================
tagged    ``<tool_call>{"name": .., "arguments": {..}}</tool_call>``, with a list     Qwen, SmolLM, Hermes, Nemotron
          of one such object, or with
          ``<function=NAME><parameter=KEY>value</parameter></function>`` inside
mistral   ``[TOOL_CALLS][{"name": .., "arguments": {..}}]``, ``[TOOL_CALLS]NAME``     Mistral
          ``[ARGS]{..}``
gemma     ``<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>``                  Gemma 4
json      the whole message is ``{"name": .., "parameters": {..}}``                   Llama 3
========  =========================================================================  ===================================

Reasoning (``<think>..</think>``, Gemma's ``<|channel>..<channel|>``) and text before a call are free. A message without
a call is the answer, without its reasoning. Pure functions of the policy's own turn, as in ``turns.tags``.

A chat template that has no place for calls, such as SmolLM2's, gets them as text (``calls_as_content``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sorl_env.errors import did_you_mean
from sorl_env.text import quoted, read_json
from sorl_env.tool.schema import find_problem, takes_raw_text
from sorl_env.tool.tool import Tool
from sorl_env.turns.tags import FormatError, ParsedTurn


@dataclass(frozen=True)
class Syntax:
    """How a family of templates writes a call. ``open`` begins it; ``close`` ends it, or it ends with the message."""

    name: str
    open: str
    close: str = ""


TAGGED = Syntax("tagged", "<tool_call>", "</tool_call>")
MISTRAL = Syntax("mistral", "[TOOL_CALLS]")
GEMMA = Syntax("gemma", "<|tool_call>", "<tool_call|>")
JSON = Syntax("json", "<|python_tag|>")
SYNTAXES = {syntax.name: syntax for syntax in (TAGGED, MISTRAL, GEMMA, JSON)}

REASONING_MARKERS = (("<think>", "</think>"), ("<|channel>", "<channel|>"))
# What only the environment writes: the beginnings and ends of replies in all templates.
_REPLIES = (
    "<tool_response>",
    "</tool_response>",
    "<|tool_response>",
    "<tool_response|>",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_FUNCTION = re.compile(r"<function=([^<>\s]{1,256})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,256})>")
_GEMMA_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"(?<![\w-])([A-Za-z_][\w-]*)\s*:")
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's
_LLAMA_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:')


class Call(NamedTuple):
    """One call as the policy wrote it. ``id`` is Mistral's, if the policy gave one."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


class CallError(ValueError):
    """A call that cannot be read; ``error`` says in which way."""

    def __init__(self, error: FormatError, detail: str) -> None:
        super().__init__(detail)
        self.error = error


def parse_message(text: str, tools: Sequence[Tool], syntax: Syntax | None = None) -> ParsedTurn:
    """Parse one message of the policy. A malformed one is returned as ``kind="invalid"``; nothing raises.

    Args:
        text: without the token that ends the message.
        syntax: of the policy's template; None takes the form that the text itself begins a call with.

    >>> parse_message("The answer is easy.", ()).kind
    'answer'
    """
    try:
        think, rest = _split_reasoning(text.strip())
        forged = next((marker for marker in _REPLIES if marker in text), None)
        if forged is not None:
            raise CallError(FormatError.FORGED_INFORMATION, f"only the environment writes {forged}")
        found = read_call(rest, syntax)
        if found is None:
            if not rest:
                raise CallError(FormatError.EMPTY, "neither a call nor an answer")
            return ParsedTurn("answer", think, None, rest)
        before, call = found
        return ParsedTurn("tool", f"{think}\n{before}".strip(), call.name, _argument(call, tools))
    except CallError as problem:
        return ParsedTurn("invalid", "", None, "", problem.error, str(problem))


def read_call(text: str, syntax: Syntax | None = None) -> tuple[str, Call] | None:
    """The text before the only call of a message, and the call; None if there is none.

    Raises:
        CallError: there are several, or one that cannot be read.
    """
    syntax = syntax or _syntax_of(text)
    if syntax is JSON:
        return _read_llama(text)
    before, opened, body = text.partition(syntax.open)
    if not opened:
        if syntax.close and syntax.close in text:
            raise CallError(FormatError.UNOPENED, f"{syntax.close} closes nothing")
        return None
    if syntax.open in body:
        raise CallError(FormatError.REPEATED, "two calls in one message")
    if syntax.close:
        body, closed, after = body.partition(syntax.close)
        if not closed:
            raise CallError(FormatError.UNCLOSED, f"{syntax.open} is not closed")
        if after.strip():
            raise CallError(FormatError.TRAILING_TEXT, f"{quoted(after.strip(), 40)} after the call")
    return before.strip(), _READERS[syntax.name](body.strip())


def write_call(name: str, arguments: Mapping[str, Any], think: str = "") -> str:
    """A message in the form ``tagged``, for players that know no template."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    thought = f"<think>\n{think}\n</think>\n\n" if think else ""
    return f"{thought}{TAGGED.open}\n{body}\n{TAGGED.close}"


def arguments_of(tool: Tool, content: str) -> Mapping[str, Any]:
    """The arguments of a call whose ``ParsedTurn.content`` is ``content``: the inverse of what ``parse_message`` does.

    Raises:
        ValueError: the tool takes several arguments and ``content`` is not a JSON object.
    """
    if takes_raw_text(tool.schema):
        return {next(iter(tool.schema["properties"])): content}
    arguments = read_json(content)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {tool.name} are not an object")
    return arguments


def _syntax_of(text: str) -> Syntax:
    """The syntax that a text begins a call with first; without any, that of Llama if the text looks like one."""
    starts = {text.find(one.open): one for one in SYNTAXES.values() if one.open in text and one is not JSON}
    if starts:
        return starts[min(starts)]
    return JSON if text.startswith(("{", JSON.open)) else TAGGED


def _split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning at the beginning of a message, and the rest. The template may have opened it in the prompt."""
    for opening, closing in REASONING_MARKERS:
        inside, closed, rest = text.partition(closing)
        if closed:
            inside = inside.removeprefix(opening)
            if opening in inside or opening in rest or closing in rest:
                raise CallError(FormatError.REPEATED, f"two blocks of reasoning ({opening})")
            return inside.removeprefix("thought\n").strip(), rest.strip()
        if opening in text:
            raise CallError(FormatError.UNCLOSED, f"{opening} is not closed")
    return "", text


def _argument(call: Call, tools: Sequence[Tool]) -> str:
    """What the environment passes to the tool: the text of its only argument, or all arguments as JSON."""
    tool = next((one for one in tools if one.name == call.name), None)
    if tool is None:
        hint = did_you_mean(call.name, [one.name for one in tools])
        raise CallError(FormatError.UNKNOWN_TOOL, f"there is no tool {quoted(call.name, 40)}. {hint}")
    properties = tool.schema["properties"]
    if not takes_raw_text(tool.schema):
        typed = {name: _typed(value, properties.get(name, {})) for name, value in call.arguments.items()}
        return json.dumps(typed, ensure_ascii=False)
    problem = find_problem(call.arguments, {**tool.schema, "additionalProperties": False})
    name = next(iter(properties))
    if problem is None and name not in call.arguments:
        problem = f"arguments lack {name!r}"
    if problem is not None:
        raise CallError(FormatError.BAD_ARGUMENTS, problem)
    value: str = call.arguments[name].strip()
    if not value:
        raise CallError(FormatError.EMPTY, f"{name!r} is empty")
    return value


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value that was written as text, in the type that its schema asks for, if it can be read as that."""
    if not isinstance(value, _Text) or (schema and find_problem(str(value), schema) is None):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


class _Text(str):
    """A parameter's text: it may stand for a number."""


def _object(body: str) -> Any:
    try:
        return read_json(body)
    except ValueError as error:
        raise CallError(FormatError.BAD_CALL, f"the call is not JSON: {error}") from None


def _call_of(value: Any, *names: str) -> Call:
    """A call from a JSON object with ``name`` and the arguments under one of ``names``."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError(FormatError.BAD_CALL, "the call is not an object with a name")
    key = next((name for name in names if name in value), None)
    arguments = {} if key is None else value[key]
    if not isinstance(arguments, dict):
        raise CallError(FormatError.BAD_CALL, f"the call's {key} are not an object")
    given = value.get("id")
    call_id = given if isinstance(given, str) and _CALL_ID.fullmatch(given) else None
    return Call(value["name"], arguments, call_id)


def _only_call(body: str, *names: str) -> Call:
    """The call of a JSON list of one."""
    calls = _object(body)
    if len(calls) != 1:
        error = FormatError.REPEATED if calls else FormatError.EMPTY
        raise CallError(error, f"{len(calls)} calls in one message")
    return _call_of(calls[0], *names)


def _read_tagged(body: str) -> Call:
    if body.startswith("["):  # SmolLM2's form
        return _only_call(body, "arguments", "parameters")
    if not body.startswith("<function="):
        return _call_of(_object(body), "arguments", "parameters")
    head = _FUNCTION.match(body)
    if head is None or not body.endswith("</function>"):
        raise CallError(FormatError.UNCLOSED, "<function=..> is not closed")
    arguments: dict[str, Any] = {}
    at, end = _past_blanks(body, head.end()), len(body) - len("</function>")
    while at < end:
        parameter = _PARAMETER.match(body, at, end)
        close = body.find("</parameter>", at, end) if parameter is not None else -1
        if parameter is None or close < 0 or parameter[1] in arguments:
            raise CallError(FormatError.BAD_CALL, "between the parameters is something else")
        arguments[parameter[1]] = _Text(body[parameter.end() : close].strip())
        at = _past_blanks(body, close + len("</parameter>"))
    return Call(head[1], arguments)


def _past_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _read_mistral(body: str) -> Call:
    if body.startswith("["):
        return _only_call(body, "arguments")
    head, brace, arguments = body.partition("{")
    name, _, given = head.removesuffix("[ARGS]").partition("[CALL_ID]")
    if not brace:
        raise CallError(FormatError.BAD_CALL, "the call has no arguments")
    return _call_of({"name": name.strip(), "arguments": _object(brace + arguments), "id": given}, "arguments")


def _read_gemma(body: str) -> Call:
    name, brace, rest = body.removeprefix("call:").partition("{")
    if not brace or not body.startswith("call:"):
        raise CallError(FormatError.BAD_CALL, "the call is not call:NAME{..}")
    parts = (brace + rest).split(_GEMMA_QUOTE)  # every second one is a text
    if len(parts) % 2 == 0:
        raise CallError(FormatError.UNCLOSED, f"a text is not closed with {_GEMMA_QUOTE}")
    parts[0::2] = [_GEMMA_KEY.sub(r'"\1":', part) for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return _call_of({"name": name.strip(), "arguments": _object("".join(parts))}, "arguments")


def _read_llama(text: str) -> tuple[str, Call] | None:
    body = text.removeprefix(JSON.open).strip()
    if body == text and not _LLAMA_CALL.match(body):
        return None
    return "", _call_of(_object(body), "parameters", "arguments")


_READERS = {"tagged": _read_tagged, "mistral": _read_mistral, "gemma": _read_gemma}


def calls_as_content(
    messages: Iterable[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The dialogue with roles system, user and assistant alone.

    Args:
        messages: as OpenAI's API has them, with ``tool_calls`` and the role ``tool``.
        schemas: the tools; without any the dialogue gets no list of them.
    """
    plain = [_plain(message) for message in messages]
    if schemas:
        own = [plain.pop(0)["content"]] if plain and plain[0]["role"] == "system" else []
        plain.insert(0, {"role": "system", "content": "\n\n".join([*own, _list_of_tools(schemas)])})
    return plain


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    for call in message.get("tool_calls") or ():
        written = write_call(call["function"]["name"], call["function"]["arguments"])
        content = f"{content}\n{written}" if content else written
    return {"role": message["role"], "content": content}


def _list_of_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    example = '{"name": <name of the tool>, "arguments": <object with its arguments>}'
    return (
        "You may call one of these tools in a message:\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"A call is the end of the message:\n<tool_call>\n{example}\n</tool_call>"
    )
