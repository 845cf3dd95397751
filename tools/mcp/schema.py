"""The names and schemas that a server declares, made such as a toolbox reads them. Neither is trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import MAX_DEPTH, quoted
from sorl_env.tool import RESERVED_NAMES

MAX_NAME_CHARS = 128
MAX_PROPERTIES = 1000
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_-]")


def tag_of(name: str) -> str:
    """The tag for a tool: its name with ``_`` for what cannot be in a tag, and behind a name that is reserved.

    >>> tag_of("files/read.text"), tag_of("answer")
    ('files_read_text', 'answer_')
    """
    tag = _NOT_IN_A_TAG.sub("_", name[:MAX_NAME_CHARS])
    tag = tag if tag[:1].isalpha() or tag[:1] == "_" else f"_{tag}"
    return f"{tag}_" if tag in RESERVED_NAMES else tag


def readable_schema(schema: Any, where: str) -> dict[str, Any]:
    """The part of a tool's schema that a toolbox checks arguments against; the server checks the rest itself.

    What a toolbox does not know (``$ref``, ``oneOf``, ``pattern``) is left out, so that anything is allowed there.

    Raises:
        UserError: it is not the schema of an object.
    """
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
    if (
        not isinstance(properties, Mapping)
        or schema.get("type") != "object"
        or len(properties) > MAX_PROPERTIES
    ):
        raise UserError(
            f"{where}: its schema {quoted(repr(schema))} is not that of an object with parameters"
        )
    return {"type": "object", "properties": {}, **_readable(schema, 0)}


def _readable(schema: Any, depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return {}
    kinds = schema.get("type")
    if isinstance(kinds, list):  # several types in one
        rest = {name: value for name, value in schema.items() if name != "type"}
        options = [_readable({**rest, "type": kind}, depth + 1) for kind in kinds]
        return {"anyOf": options} if options and all(options) else {}
    read: dict[str, Any] = {"type": kinds} if isinstance(kinds, str) and kinds in _TYPES else {}
    if isinstance(schema.get("description"), str):
        read["description"] = schema["description"]
    if isinstance(schema.get("enum"), list):
        read["enum"] = schema["enum"]
    for name in ("minimum", "maximum"):
        if isinstance(schema.get(name), (int, float)) and not isinstance(schema[name], bool):
            read[name] = schema[name]
    choices = schema.get("anyOf")
    if isinstance(choices, list) and choices:
        read["anyOf"] = [_readable(choice, depth + 1) for choice in choices]
    if isinstance(schema.get("items"), Mapping):
        read["items"] = _readable(schema["items"], depth + 1)
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        read["properties"] = {str(name): _readable(part, depth + 1) for name, part in properties.items()}
        required = schema.get("required")
        if isinstance(required, list):
            read["required"] = [name for name in required if isinstance(name, str)]
    if isinstance(schema.get("additionalProperties"), bool):
        read["additionalProperties"] = schema["additionalProperties"]
    return read
