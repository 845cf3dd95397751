"""Tools of servers that speak the Model Context Protocol (MCP); needs the extra ``mcp``."""

from sorl_tools.mcp.server import McpServer
from sorl_tools.mcp.tool import McpTool, mcp_tools, open_tools

__all__ = ["McpServer", "McpTool", "mcp_tools", "open_tools"]
