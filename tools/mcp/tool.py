"""The tools of an MCP server as tools of the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sorl_env.errors import UserError
from sorl_env.task import ToolSettings
from sorl_env.text import quoted, valid_text
from sorl_env.tool import ToolInputError, ToolReply, ToolUnavailableError
from sorl_env.tool_schema import takes_raw_text
from sorl_tools.mcp.schema import readable_schema, tag_of
from sorl_tools.mcp.server import McpServer

if TYPE_CHECKING:
    import mcp_types

SHARED = "mcp"
PER_EPISODE = "mcp+episode"


class McpTool:
    """One tool of a server that all episodes share.

    Raises:
        ToolInputError: when called: the server refused the arguments, or its result is an error.
        ToolUnavailableError: when called: no connection, a time-out, or a reply that breaks the protocol.
    """

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
    """One tool of a server that remembers: each episode has a connection of its own, for all tools of the server.

    A command is then a process for each episode, started at the first call.
    """

    def __init__(
        self, server: McpServer, listed: mcp_types.Tool, fingerprint: str, group: EpisodeGroup
    ) -> None:
        super().__init__(server, listed, fingerprint)
        self.group = group

    def new_episode(self, seed: int) -> EpisodeTool:
        """The tool for one episode, when it is the server's only one; a toolbox asks the group."""
        return self.group.new_episode(seed)[self.name]


class EpisodeGroup:
    """The tools of one server in one episode, which share its connection and its state."""

    def __init__(self) -> None:
        self.tools: dict[str, EpisodeTool] = {}

    def new_episode(self, seed: int) -> dict[str, EpisodeTool]:
        """The tools for another episode, by name. The server gets no seed: the protocol has none."""
        server = next(iter(self.tools.values())).server
        fresh, group = McpServer(server.target, server.timeout_s, keeps_state=True), EpisodeGroup()
        for name, tool in self.tools.items():
            group.tools[name] = EpisodeTool(fresh, tool.listed, tool.fingerprint, group)
        return group.tools


def mcp_tools(server: Any, timeout_s: float = 30.0, *, per_episode: bool = False) -> list[McpTool]:
    """All tools of an MCP server.

    Args:
        server: an address, a command, or a server object of the ``mcp`` package, see ``Target``.
        timeout_s: for each call, and for connecting.
        per_episode: the server remembers earlier calls, so each episode gets a connection of its own. Otherwise all
            episodes share one.

    Raises:
        UserError: no server answers, it has no tools, two of its tools have the same tag, or a schema is unreadable.
    """
    connection = McpServer(server, timeout_s)
    where, group = connection.target.name, EpisodeGroup()
    tools: dict[str, McpTool] = {}
    try:
        listed, version = connection.list_tools()
        fingerprint = f"{where} ({version})" if version else where
        for one in listed:
            made: McpTool
            if per_episode:
                made = group.tools[tag_of(one.name)] = EpisodeTool(connection, one, fingerprint, group)
            else:
                made = McpTool(connection, one, fingerprint)
            if made.name in tools:
                raise UserError(f"mcp:{where}: two of its tools would have the tag <{made.name}>")
            tools[made.name] = made
        if not tools:
            raise UserError(f"mcp:{where}: the server has no tools")
    except (ToolUnavailableError, ToolInputError) as error:
        connection.close()
        raise UserError(
            f"mcp:{where}: the server does not list its tools ({error}); is it running?"
        ) from error
    except UserError:
        connection.close()
        raise
    if per_episode:
        connection.close()
    return list(tools.values())


def open_tools(reference: str, settings: ToolSettings) -> list[McpTool]:
    """The tools that ``mcp:SERVER`` or ``mcp+episode:SERVER`` names: shared by all episodes, or each with its own.

    Raises:
        UserError: as ``mcp_tools``; or the kind is another one.
    """
    kind, _, server = reference.partition(":")
    if kind not in (SHARED, PER_EPISODE):
        raise UserError(f"tools: {reference!r} begins with neither {SHARED}: nor {PER_EPISODE}:")
    return mcp_tools(server.strip(), settings.timeout_s, per_episode=kind == PER_EPISODE)


def reply_of(result: mcp_types.CallToolResult) -> ToolReply:
    """The text of a result. What is no text is named and left out; a result without any is its structured content.

    Raises:
        ToolInputError: the result is an error; the policy reads it.
    """
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
