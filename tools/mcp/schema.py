"""The names and schemas that a server declares, made such as a toolbox reads them. Neither is trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import MAX_DEPTH, quoted
from sorl_env.tool import RESERVED_NAMES
from sorl_env.tool_schema import PYTHON_TYPES

MAX_NAME_CHARS = 128
MAX_PROPERTIES = 1000
# Keywords that a toolbox knows beside anyOf, items and properties, and the types of their values.
_KEPT: dict[str, tuple[type, ...]] = {
    "type": (str,),
    "description": (str,),
    "enum": (list,),
    "minimum": (int, float),
    "maximum": (int, float),
    "required": (list,),
    "additionalProperties": (bool,),
}
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
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise UserError(
            f"{where}: its schema {quoted(repr(schema))} is not that of an object with parameters"
        )
    read = {"properties": {}, **_readable(schema, 0)}
    if len(read["properties"]) > MAX_PROPERTIES:
        raise UserError(f"{where}: it has more than {MAX_PROPERTIES} parameters")
    return read


def _readable(schema: Any, depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return {}
    kinds = schema.get("type")
    if isinstance(kinds, list):  # several types in one
        options = [_readable({**schema, "type": kind}, depth + 1) for kind in kinds]
        return {"anyOf": options} if options and all(options) else {}
    read = {name: schema[name] for name, kept in _KEPT.items() if isinstance(schema.get(name), kept)}
    if kinds not in (*PYTHON_TYPES,):
        read.pop("type", None)
    if "required" in read:
        read["required"] = [name for name in read["required"] if isinstance(name, str)]
    if isinstance(choices := schema.get("anyOf"), list) and choices:
        read["anyOf"] = [_readable(choice, depth + 1) for choice in choices]
    if isinstance(schema.get("items"), Mapping):
        read["items"] = _readable(schema["items"], depth + 1)
    if isinstance(properties := schema.get("properties"), Mapping):
        read["properties"] = {str(name): _readable(part, depth + 1) for name, part in properties.items()}
    return read
