"""MCP servers for the tests: a real one of the ``mcp`` package, and one that lies.

``python servers.py stock`` speaks MCP on its standard input and output. ``python servers.py liar WHAT`` does so by
hand, without the package: it begins as a good server does and then does ``WHAT``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STOCK = {"oak A 1": "bolts 7 , lamps 3", "elm B 2": "bolts 12 , lamps 0"}


def stock_server() -> Any:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("stock", version="1.2")
    notes: list[str] = []

    @server.tool()
    def shelf(name: str) -> str:
        """List what lies on a shelf,
        given its name."""
        if name not in STOCK:
            raise ToolError(f"there is no shelf {name}")
        return STOCK[name]

    @server.tool(name="note.add")
    def note(line: str, times: int = 1) -> str:
        """Write a line down, and see all lines so far."""
        notes.extend([line] * times)
        return " / ".join(notes)

    return server


def send(identity: Any, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": identity, **fields}) + "\n")
    sys.stdout.flush()


def answer(identity: Any, result: Any) -> None:
    send(identity, result=result)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LISTINGS: dict[str, Any] = {
    "no schema": [{"name": "shelf"}],
    "list for a schema": [{"name": "shelf", "inputSchema": []}],
    "array": [{"name": "shelf", "inputSchema": {"type": "array"}}],
    "no tools": [],
    "twice": [{"name": "a.b", "inputSchema": SCHEMA}, {"name": "a/b", "inputSchema": SCHEMA}],
    "text for tools": "shelf",
}


def lie(what: str) -> None:
    """Speak the protocol by hand, one line at a time."""
    for line in sys.stdin:
        message = json.loads(line)
        method, identity = message["method"], message.get("id")
        if method == "server/discover":
            send(identity, error={"code": -32601, "message": "unknown"})
        elif method == "initialize":
            if what == "hang at once":
                time.sleep(3600)
            info = {"name": "liar", "version": "0"}
            version = message["params"]["protocolVersion"]
            answer(identity, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            if what == "endless listing":
                answer(identity, {"tools": [], "nextCursor": "more"})
                continue
            answer(identity, {"tools": LISTINGS.get(what, [{"name": "shelf", "inputSchema": SCHEMA}])})
        elif method == "tools/call":
            call(what, identity)
    if what == "linger":  # after the end of its input
        time.sleep(3600)


def text(said: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}]}


def call(what: str, identity: Any) -> None:
    if what == "hang":
        time.sleep(3600)
    elif what == "die":
        os._exit(3)
    elif what in ("die once", "hang once"):
        marker = Path(os.environ["HOME"]) / "failed"
        if not marker.exists():
            marker.touch()
            time.sleep(3600 if what == "hang once" else 0)
            os._exit(3)
        answer(identity, text("back"))
    elif what == "no JSON":
        print("Traceback (most recent call last): ...", flush=True)
    elif what == "endless line":
        while True:
            sys.stdout.write("x" * 1_000_000)
    elif what == "wrong id":
        answer(987654, text("for somebody else"))
    elif what == "wrong id first":
        answer(987654, text("for somebody else"))
        answer(identity, text("for you"))
    elif what == "no content":
        answer(identity, {"something": "else"})
    elif what == "null":
        answer(identity, None)
    elif what == "surrogate":
        answer(identity, text("\ud800 a pair"))  # JSON escapes it
    elif what == "image":
        image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
        answer(identity, {"content": [image, {"type": "text", "text": "a shelf"}]})
    elif what == "is_error":
        answer(identity, {**text("there is no such shelf"), "isError": True})
    elif what == "bug":
        send(identity, error={"code": -32603, "message": "something broke"})
    else:
        answer(identity, text(f"{os.getpid()}"))


if __name__ == "__main__":
    if sys.argv[1] == "stock":
        stock_server().run("stdio")
    else:
        lie(" ".join(sys.argv[2:]))
