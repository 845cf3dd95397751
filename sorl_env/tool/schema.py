"""JSON schemas of tools: derived from a function's signature, and used to check what the policy wrote."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from sorl_env.text import quoted, read_json

_MAX_PROBLEM_CHARS = 200  # of a message about the policy's arguments that Python wrote
MAX_INTEGER = 2**63 - 1  # no tool needs larger ones, and arithmetic of them with floats raises

_SCALARS: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a function's arguments, from its type hints and defaults.

    Supported hints: str, int, float, bool, list[X], dict, Literal[...] and Optional of these.

    Raises:
        TypeError: a parameter has no hint, one that cannot be read or is not supported, or is variadic.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise TypeError(
            f"tool {name}: a type hint cannot be read ({error}); import it outside of TYPE_CHECKING"
        ) from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name}: parameter {parameter} cannot be passed by name")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name!r} needs a type hint, such as `: str`")
        properties[parameter.name] = _schema_of_hint(hints[parameter.name], f"tool {name}: {parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            properties[parameter.name]["default"] = parameter.default
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema_of_hint(hint: Any, where: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Literal:
        return {"enum": list(args)}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _schema_of_hint(args[0], where)} if args else {})}
    if hint is dict or origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        options = [{"type": "null"} if arg is type(None) else _schema_of_hint(arg, where) for arg in args]
        return {"anyOf": options}
    raise TypeError(f"{where}: no JSON schema for {hint!r}; use str, int, float, bool, list, dict or Literal")


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Refuse a schema that ``find_problem`` cannot read.

    Raises:
        ValueError: the arguments are not an object, or a part of the schema has an unknown type.
    """
    if schema.get("type") != "object" or not isinstance(schema.get("properties"), Mapping):
        raise ValueError(f"{where}: its schema must be an object with properties, not {schema!r}")
    pending: list[Mapping[str, Any]] = [schema]
    while pending:
        part = pending.pop()
        if "type" in part and not (isinstance(part["type"], str) and part["type"] in PYTHON_TYPES):
            known = ", ".join(PYTHON_TYPES)
            raise ValueError(f"{where}: unknown type {part['type']!r}; use {known} or anyOf")
        pending += [*part.get("anyOf", ()), *part.get("properties", {}).values()]
        pending += [part["items"]] if "items" in part else []


def takes_raw_text(schema: Mapping[str, Any]) -> bool:
    """Whether the block's text itself is the argument, and not JSON: the only parameter is any string."""
    properties = list(schema["properties"].values())
    return len(properties) == 1 and properties[0].get("type") == "string" and "enum" not in properties[0]


def read_arguments(body: str, schema: Mapping[str, Any], signature: inspect.Signature) -> tuple[Any, str]:
    """The arguments in a block's body, and what is wrong with them in words for the policy ("" if nothing is).

    A tool is called only with arguments that its schema and its signature allow. If it raises all the same, that is a
    bug of the tool and not something that a policy could cause at will, to end bad trajectories that would then be left
    out of the loss and of evaluations.
    """
    known = schema["properties"]
    try:
        arguments = read_json(body)
    except ValueError as error:
        said = str(error).removeprefix("it is not JSON: ")
        return None, f"The request is not a JSON object: {said}. Parameters: {', '.join(known)}."
    problem = find_problem(arguments, {"additionalProperties": False, **schema}) or _find_extreme(arguments)
    if problem is None:
        try:
            signature.bind(**arguments)
        except TypeError as error:
            problem = str(error)[:_MAX_PROBLEM_CHARS]
    return arguments, f"The request does not fit the tool: {problem}." if problem else ""


def find_problem(value: Any, schema: Mapping[str, Any], path: str = "arguments") -> str | None:
    """What is wrong with ``value``, in words for the policy, or None. The message is short, however long the value is.

    Checks ``type, enum, anyOf, properties, required, additionalProperties, items, minimum, maximum``. Other keywords of
    a hand-written schema are ignored.
    """
    if "anyOf" in schema:
        if any(find_problem(value, option, path) is None for option in schema["anyOf"]):
            return None
        wanted = " or ".join(str(option.get("type", option.get("enum"))) for option in schema["anyOf"])
        return f"{path} must be {wanted}"
    # compare types as well: in Python True equals 1, in JSON it does not
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        return f"{path} must be one of {', '.join(map(repr, schema['enum']))}"
    expected = schema.get("type")
    if expected is not None and (
        not isinstance(value, PYTHON_TYPES[expected]) or (isinstance(value, bool) and expected != "boolean")
    ):
        return f"{path} must be {expected}, not {type(value).__name__}"
    if isinstance(value, (int, float)):
        if value < schema.get("minimum", value):
            return f"{path} must be at least {schema['minimum']}"
        if value > schema.get("maximum", value):
            return f"{path} must be at most {schema['maximum']}"
    inner: Iterable[tuple[str, Any, Mapping[str, Any]]] = ()
    if expected == "array":
        inner = ((f"{path}[{i}]", item, schema.get("items", {})) for i, item in enumerate(value))
    elif expected == "object":
        properties: Mapping[str, Any] = schema.get("properties", {})
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"{path} lack {', '.join(map(repr, missing))}"
        unknown = [name for name in value if name not in properties]
        if unknown and schema.get("additionalProperties") is False:
            known = ", ".join(map(repr, properties))
            return f"{path} have no parameter {quoted(unknown[0])}; there are {known}"
        inner = ((f"{path}.{name}", value[name], properties[name]) for name in value if name in properties)
    return next(filter(None, (find_problem(item, part, where) for where, item, part in inner)), None)


def _find_extreme(value: Any) -> str | None:
    """What is extreme about a number: Python's parser accepts ``NaN``, ``1e999`` and integers of any length."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number is not finite"
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"an integer is beyond {MAX_INTEGER}"
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return next((problem for problem in map(_find_extreme, inner) if problem), None)
    return None
