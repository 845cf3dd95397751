"""Tools that the policy may call: what they are, their schemas, and how they are called."""

from sorl_env.tool.tool import (
    MAX_REPLY_CHARS,
    RESERVED_NAMES,
    Tool,
    ToolCall,
    ToolInputError,
    ToolLike,
    ToolOutcome,
    ToolReply,
    ToolRequest,
    ToolResult,
    ToolUnavailableError,
    as_tool,
    begin_episode,
    keeps_state,
)

__all__ = [
    "MAX_REPLY_CHARS",
    "RESERVED_NAMES",
    "Tool",
    "ToolCall",
    "ToolInputError",
    "ToolLike",
    "ToolOutcome",
    "ToolReply",
    "ToolRequest",
    "ToolResult",
    "ToolUnavailableError",
    "as_tool",
    "begin_episode",
    "keeps_state",
]
