"""Tool calls in the text of a dialogue, for chat templates that have no place for them, such as SmolLM2's.

The tools are listed in the system message, a call is the content of the assistant's message, and a reply is a user's
message. The forms are those that Qwen's and Hermes' templates render.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sorl_env.tool_call_parser import write_call


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
