"""Part of ``sorl-check-task``: do episodes that run at the same time leave each other's tools alone?

Rollouts run many episodes at a time, so a tool that keeps state without ``new_episode`` mixes them up, and nothing but
a comparison shows it: the same calls have to get the same replies in an episode alone, in one beside another, and in
one that is put away and restored.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_env.env import ToolUseEnv
from sorl_env.tool import Tool, ToolRequest, ToolUnavailableError
from sorl_env.tool_schema import takes_raw_text

_SEED = 7
_MOST_REQUESTS = 8  # of one tool, where its arguments have values to choose from
_ROUNDS = 3


@dataclass(frozen=True)
class Check:
    """One clause of the contract: whether it holds, and what was seen."""

    name: str
    passed: bool
    detail: str
    tool_is_out: bool = False  # it could not be reached, so no episode that uses it can be checked


def check_episodes(env: ToolUseEnv) -> Check:
    """Two episodes whose tool calls alternate get the replies that each of them gets alone."""
    name = "episodes"
    question = env.examples.examples[0].question
    # no other check asks in these words, so that what it left in a tool cannot be taken for an episode's own
    scripts = [_script(env.toolbox.tools, f"{question} ({part})") for part in ("first", "second")]
    try:
        alone = [_run([env], [script])[0] for script in scripts]
        together = _run([env, env], scripts)
        restored = _run([env], [scripts[0]], restore=True)[0] if env.toolbox.stateful else alone[0]
    except _OutError as error:
        return Check(name, False, f"not known: {error}")
    for script, expected, seen in zip(
        [*scripts, scripts[0]], [*alone, alone[0]], [*together, restored], strict=True
    ):
        for request, one, other in zip(script, expected, seen, strict=True):
            if one != other:
                return Check(name, False, _difference(env, request, one, other, seen is restored))
    kept = ", ".join(sorted(env.toolbox.stateful))
    said = f"; {kept} keeps a state of its own in each, which is restored" if kept else ""
    return Check(name, True, f"two at the same time get the replies of each alone{said}")


class _OutError(Exception):
    """A tool was out, so nothing can be compared."""


def _difference(env: ToolUseEnv, request: ToolRequest, one: str, other: str, was_restored: bool) -> str:
    seen = f"tool {request.tool} replies {one[:60]!r} to {request.argument[:60]!r}"
    if was_restored:
        return f"{seen} in an episode, and {other[:60]!r} after get_state and set_state: they must hold all it keeps"
    if request.tool in env.toolbox.stateful:
        return f"{seen} alone, and {other[:60]!r} beside another episode: new_episode must share nothing that changes"
    return (
        f"{seen} at first, and {other[:60]!r} in a later episode with the same calls: it keeps state over episodes, or "
        "something that it shares with another tool does, or it draws at random. Give what keeps state new_episode, "
        "get_state and set_state (docs/add_a_tool.md)"
    )


def _run(
    roots: Sequence[ToolUseEnv], scripts: Sequence[Sequence[ToolRequest]], restore: bool = False
) -> list[list[str]]:
    """The replies to each script, in episodes of the same seed whose calls alternate.

    Args:
        restore: before each call the episode goes on in another environment, from its state.
    """
    envs = [root.spawn() for root in roots]
    seen: list[list[str]] = [[] for _ in envs]
    try:
        for env in envs:
            env.reset(seed=_SEED, options={"index": 0})
        for requests in zip(*scripts, strict=True):
            for number, request in enumerate(requests):
                if restore:
                    state = envs[number].get_state()
                    envs[number].end_tools()
                    envs[number] = roots[number].spawn()
                    envs[number].set_state(state)
                outcome = envs[number].toolbox.call(request)
                if isinstance(outcome, ToolUnavailableError):
                    raise _OutError(str(outcome))
                seen[number].append(outcome.reply)
    finally:
        for env in envs:
            env.end_tools()
    return seen


def _script(tools: Sequence[Tool], text: str) -> list[ToolRequest]:
    """Calls of all tools with all values of their choices, several times over: what one writes another may read."""
    once = [request for tool in tools for request in itertools.islice(requests(tool, text), _MOST_REQUESTS)]
    return once * _ROUNDS


def requests(tool: Tool, text: str) -> Iterator[ToolRequest]:
    """Requests that fit the schema, with ``text`` for every text; one for each combination of values to choose from."""
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
