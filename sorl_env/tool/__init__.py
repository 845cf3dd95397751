"""Tools that the policy may call: what they are, their schemas, and how they are called."""

from sorl_env.tool.tool import (
    RESERVED_NAMES,
    ToolCall,
    ToolInputError,
    ToolLike,
    ToolReply,
    ToolRequest,
    ToolUnavailableError,
    as_tool,
)

__all__ = [
    "RESERVED_NAMES",
    "ToolCall",
    "ToolInputError",
    "ToolLike",
    "ToolReply",
    "ToolRequest",
    "ToolUnavailableError",
    "as_tool",
]
