"""The tools of an MCP server as tools of the policy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sorl_env.errors import UserError
from sorl_env.task import ToolSettings
from sorl_env.text import MAX_DEPTH, quoted, valid_text
from sorl_env.tool import RESERVED_NAMES, ToolInputError, ToolReply, ToolUnavailableError
from sorl_env.tool.schema import PYTHON_TYPES, takes_raw_text
from sorl_tools.mcp.server import McpServer

if TYPE_CHECKING:
    import mcp_types

SHARED = "mcp"
PER_EPISODE = "mcp+episode"
_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_-]")
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


class McpTool:
    """One tool of a server that all episodes share. A call raises ``ToolInputError`` if the server refused the
    arguments, or its result is an error, and ``ToolUnavailableError`` without a connection, after a time-out, or for a
    reply that breaks the protocol."""

    inline = False

    def __init__(self, server: McpServer, listed: mcp_types.Tool, fingerprint: str) -> None:
        self.name = tag_of(listed.name)
        self.description = valid_text(listed.description or "")
        where = f"tool {quoted(listed.name)} of {server.target.name}"
        self.schema: Mapping[str, Any] = readable_schema(listed.input_schema, where)
        self.url = server.target.name
        self.fingerprint = fingerprint
        self.server = server
        self.listed = listed
        # a single text is not wrapped in JSON by the policy, but it is for the server
        self._only = next(iter(self.schema["properties"])) if takes_raw_text(self.schema) else None

    def __call__(self, *texts: str, **arguments: Any) -> ToolReply:
        """Call the tool once: with the text of the block, or with the parameters by name."""
        named = {self._only: texts[0]} if self._only is not None and texts else arguments
        return reply_of(self.server.call(self.listed.name, named))

    def close(self) -> None:
        """Close the server's connection, which its other tools use as well."""
        self.server.close()


class EpisodeTool(McpTool):
    """One tool of a server that remembers: each episode has a connection of its own, for all tools of the server. A
    command is then a process for each episode, started at the first call."""

    def __init__(
        self, server: McpServer, listed: mcp_types.Tool, fingerprint: str, group: EpisodeGroup
    ) -> None:
        super().__init__(server, listed, fingerprint)
        self.group = group

    def new_episode(self, example: object, seed: int) -> McpTool:
        """The tool for one episode, when it is the server's only one; a toolbox asks the group."""
        return self.group.new_episode(example, seed)[self.name]

    def close(self) -> None:
        """Close the episode's connection, without waiting: other episodes go on in the same event loop."""
        self.server.close(wait=False)


class EpisodeGroup:
    """The tools of one server in one episode, by name, which share its connection and its state."""

    def __init__(self, tools: dict[str, McpTool]) -> None:
        self.tools = tools

    def new_episode(self, example: object, seed: int) -> dict[str, McpTool]:
        """The tools for another episode, by name. The server learns neither the example nor the
        seed: the protocol has no place for them."""
        server = next(iter(self.tools.values())).server
        fresh, group = McpServer(server.target, server.timeout_s, keeps_state=True), EpisodeGroup({})
        for name, tool in self.tools.items():
            group.tools[name] = EpisodeTool(fresh, tool.listed, tool.fingerprint, group)
        return group.tools


def mcp_tools(server: Any, timeout_s: float = 30.0, *, per_episode: bool = False) -> list[McpTool]:
    """All tools of an MCP server. For ``server`` see ``Target``; ``timeout_s`` is for each call, and for connecting.
    With ``per_episode`` the server remembers earlier calls, so each episode gets a connection of its own. Otherwise all
    episodes share one. Raises ``UserError`` if no server answers, it has no tools, two of its tools have the same tag,
    or a schema is unreadable."""
    connection = McpServer(server, timeout_s)
    where = connection.target.name
    tools: dict[str, McpTool] = {}
    group = EpisodeGroup(tools)
    with ExitStack() as stack:
        stack.callback(connection.close)
        try:
            listed, version = connection.list_tools()
        except (ToolUnavailableError, ToolInputError) as error:
            said = f"mcp:{where}: the server does not list its tools ({error}); is it running?"
            raise UserError(said) from error
        fingerprint = f"{where} ({version})" if version else where
        for one in listed:
            made = McpTool(connection, one, fingerprint)
            if per_episode:
                made = EpisodeTool(connection, one, fingerprint, group)
            if made.name in tools:
                raise UserError(f"mcp:{where}: two of its tools would have the tag <{made.name}>")
            tools[made.name] = made
        if not tools:
            raise UserError(f"mcp:{where}: the server has no tools")
        if not per_episode:
            stack.pop_all()  # the connection stays open
    return list(tools.values())


def open_tools(reference: str, settings: ToolSettings) -> list[McpTool]:
    """The tools that ``mcp:SERVER`` (shared by all episodes) or ``mcp+episode:SERVER`` names; see ``mcp_tools``."""
    kind, _, server = reference.partition(":")
    if kind not in (SHARED, PER_EPISODE):
        raise UserError(f"tools: {reference!r} begins with neither {SHARED}: nor {PER_EPISODE}:")
    return mcp_tools(server.strip(), settings.timeout_s, per_episode=kind == PER_EPISODE)


def tag_of(name: str) -> str:
    """The tag for a tool: its name with ``_`` for what cannot be in a tag, and behind a name that is reserved.

    >>> tag_of("files/read.text"), tag_of("answer")
    ('files_read_text', 'answer_')
    """
    tag = _NOT_IN_A_TAG.sub("_", name[:128])
    tag = tag if tag[:1].isalpha() or tag[:1] == "_" else f"_{tag}"
    return f"{tag}_" if tag in RESERVED_NAMES else tag


def readable_schema(schema: Any, where: str) -> dict[str, Any]:
    """The part of a tool's schema that a toolbox checks arguments against; the server checks the rest itself. What a
    toolbox does not know (``$ref``, ``oneOf``, ``pattern``) is left out, so that anything is allowed there. Raises
    UserError if it is not the schema of an object."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise UserError(
            f"{where}: its schema {quoted(repr(schema))} is not that of an object with parameters"
        )
    return {"properties": {}, **_readable(schema, 0)}


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


def reply_of(result: mcp_types.CallToolResult) -> ToolReply:
    """The text of a result. Content that is not text is named and left out; a result without content is its
    structured content. Raises ToolInputError if the result is an error; the policy reads it."""
    text = "\n".join(filter(None, map(_text_of, result.content)))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolInputError(text or "The tool failed and did not say why.")
    return ToolReply(text or "The tool returned nothing.")


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        inner = block.resource
        return str(inner.text) if hasattr(inner, "text") else f"[{inner.uri}: not a text, left out]"
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type} {getattr(block, 'mime_type', '')}: not a text, left out]"
