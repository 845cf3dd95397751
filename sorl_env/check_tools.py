"""Part of ``sorl-check-task``: does each tool answer, whatever the policy writes?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from sorl_env.check import Check, raised
from sorl_env.check_episodes import requests
from sorl_env.env import ToolUseEnv
from sorl_env.text import quoted
from sorl_env.tool import Tool, ToolOutcome, ToolRequest, ToolUnavailableError
from sorl_env.tool_schema import takes_raw_text

# What a policy in training writes. None of it does harm to a tool that changes something.
_TEXTS = ("?", "0", "-1", "nothing", "two words", '"', "(", "[1, 2]", "%s", "\N{SNOWMAN}\n\0", "x" * 2000)
_NUMBERS = (0, -1, 2**53)
_MOST_REQUESTS = 40


def check_tool(env: ToolUseEnv, tool: Tool, question: str) -> Check:
    """The tool answers within its deadline, alone, in a batch, and to junk. A refusal counts as an answer."""
    name = f"tool {tool.name}"
    request = next(requests(tool, question))
    fresh = env.spawn()
    fresh.begin_episode(0)
    try:
        first = fresh.toolbox.call(request)
        outcomes = [first]
        if not isinstance(first, ToolUnavailableError):
            outcomes += fresh.toolbox.call_batch([request, request])
        for outcome in outcomes:
            if problem := _problem(name, request, outcome):
                return problem
        for junk in itertools.islice(_junk(tool), _MOST_REQUESTS):
            if problem := _problem(name, junk, fresh.toolbox.call(junk)):
                return problem
    finally:
        fresh.end_episode()
    assert not isinstance(first, ToolUnavailableError)
    hits = "" if first.hits is None else f", {first.hits} hits"
    return Check(name, True, f"{first.latency_s * 1000:.1f} ms{hits}: {' '.join(first.reply.split())[:60]!r}")


def _problem(name: str, request: ToolRequest, outcome: ToolOutcome) -> Check | None:
    asked = quoted(request.argument)
    if not isinstance(outcome, ToolUnavailableError):
        silent = f"an empty reply to {asked}, which tells the policy nothing"
        return None if outcome.reply.strip() else Check(name, False, silent)
    if "bug in the tool" not in str(outcome):
        detail = f"{outcome} (asked for {asked}); start it, or correct its address. Episodes were not checked"
        return Check(name, False, detail, tool_is_out=True)
    cause = outcome.__cause__
    what = str(outcome) if cause is None else raised(cause)
    return Check(
        name, False, f"asked for {asked}: {what}; raise ToolInputError, whose text the policy then reads"
    )


def _junk(tool: Tool) -> Iterator[ToolRequest]:
    """Requests that the schema allows, with texts and numbers that no question needs."""
    if takes_raw_text(tool.schema):
        yield from (ToolRequest(tool.name, text) for text in _TEXTS)
        return
    for text in _TEXTS:
        yield next(requests(tool, text))
    properties = tool.schema["properties"]
    numbers = [name for name, one in properties.items() if one.get("type") in ("integer", "number")]
    for request in itertools.islice(requests(tool, "?"), len(_TEXTS)):
        for values in itertools.product(_NUMBERS, repeat=min(len(numbers), 2)):
            given = dict(zip(numbers, values, strict=False))
            yield ToolRequest(tool.name, json.dumps(json.loads(request.argument) | given))
