"""Part of ``sorl-check-task``: does each episode get its own tool state when several run at the same time?

Rollouts run many episodes at once. A tool that keeps state without offering ``new_episode`` mixes them up, and
only a comparison shows it. So the same calls are made in an episode alone and in an episode beside another one; the
replies must be the same each time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sorl_env.check import Check
from sorl_env.env import ToolUseEnv
from sorl_env.tool import Tool, ToolRequest, ToolUnavailableError
from sorl_env.tool_schema import takes_raw_text

_SEED = 7
_MOST_REQUESTS = 8  # different requests to one tool, where its schema offers values to choose from
_ROUNDS = 3


def check_episodes(env: ToolUseEnv) -> Check:
    """Two episodes whose tool calls alternate must get the replies that each of them gets alone."""
    name = "episodes"
    question = env.examples.examples[0].question
    # No other check uses these words, so the replies do not depend on what an earlier check left in a tool.
    scripts = [_script(env.toolbox.tools, f"{question} ({part})") for part in ("first", "second")]
    try:
        alone = [_run([env], [script])[0] for script in scripts]
        together = _run([env, env], scripts)
    except _OutError as error:
        return Check(name, False, f"could not be checked: {error}")
    for script, expected, seen in zip(scripts, alone, together, strict=True):
        for request, one, other in zip(script, expected, seen, strict=True):
            if one != other:
                return Check(name, False, _difference(env, request, one, other))
    kept = ", ".join(sorted(env.toolbox.stateful))
    said = f"; {kept} keeps a state of its own in each" if kept else ""
    return Check(name, True, f"two at the same time get the same replies as each alone{said}")


class _OutError(Exception):
    """A tool was unavailable, so there is nothing to compare."""


def _difference(env: ToolUseEnv, request: ToolRequest, one: str, other: str) -> str:
    seen = f"tool {request.tool} replies {one[:60]!r} to {request.argument[:60]!r}"
    if request.tool in env.toolbox.stateful:
        return (
            f"{seen} alone, and {other[:60]!r} beside another episode: the tools that new_episode returns must not "
            "share anything that changes"
        )
    return (
        f"{seen} at first, and {other[:60]!r} in a later episode with the same calls. The tool remembers earlier "
        "episodes, shares such a memory with another tool, or draws at random. Give it new_episode (docs/add_a_tool.md)"
    )


def _run(roots: Sequence[ToolUseEnv], scripts: Sequence[Sequence[ToolRequest]]) -> list[list[str]]:
    """The replies to each script, played in episodes of the same seed whose calls alternate."""
    envs = [root.spawn() for root in roots]
    seen: list[list[str]] = [[] for _ in envs]
    try:
        for env in envs:
            env.reset(seed=_SEED, options={"index": 0})
        for requests in zip(*scripts, strict=True):
            for number, request in enumerate(requests):
                outcome = envs[number].toolbox.call(request)
                if isinstance(outcome, ToolUnavailableError):
                    raise _OutError(str(outcome))
                seen[number].append(outcome.reply)
    finally:
        for env in envs:
            env.end_episode()
    return seen


def _script(tools: Sequence[Tool], text: str) -> list[ToolRequest]:
    """Calls of every tool with all its choices, several times over, because a call may read what another one wrote."""
    once = [request for tool in tools for request in itertools.islice(requests(tool, text), _MOST_REQUESTS)]
    return once * _ROUNDS


def requests(tool: Tool, text: str) -> Iterator[ToolRequest]:
    """Requests that fit the schema: ``text`` for every string, and one request per combination of the choices."""
    if takes_raw_text(tool.schema):
        yield ToolRequest(tool.name, text)
        return
    properties: Mapping[str, Any] = tool.schema.get("properties", {})
    names = list(tool.schema.get("required", ()))
    for values in itertools.product(*(_sample_values(properties[name], text) for name in names)):
        yield ToolRequest(tool.name, json.dumps(dict(zip(names, values, strict=True))))


def _sample_values(schema: Mapping[str, Any], text: str) -> Sequence[Any]:
    if "enum" in schema:
        return list(schema["enum"])
    if "anyOf" in schema:
        return _sample_values(schema["anyOf"][0], text)
    number = schema.get("minimum", 1)
    values = {"string": text, "integer": number, "number": number, "boolean": True, "array": [], "object": {}}
    return [values.get(schema["type"])]
