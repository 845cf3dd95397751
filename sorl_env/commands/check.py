"""The clauses of a contract as they were found, and those about tools: does each answer whatever the policy writes,
and does it keep episodes apart?"""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.outside import OutsideError
from sorl_env.task.import_file import user_files
from sorl_env.text import quoted
from sorl_env.tool.schema import takes_raw_text
from sorl_env.tool.tool import Tool, ToolCall, ToolOutcome, ToolRequest, ToolUnavailableError


@dataclass(frozen=True)
class Check:
    """One clause of a contract: whether it holds, and what was seen."""

    name: str
    passed: bool
    detail: str
    tool_is_out: bool = False  # the tool could not be reached, so no episode that uses it can be checked


def describe_checks(checks: Sequence[Check], width: int) -> str:
    """A line for each check, with its name in ``width`` characters, and a last line that counts the failures."""
    states = ["ok  " if check.passed else "FAIL" for check in checks]
    lines = [f"  {state}  {one.name:<{width}}{one.detail}" for state, one in zip(states, checks, strict=True)]
    failed = sum(not check.passed for check in checks)
    summary = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    return "\n".join([*lines, summary])


def raised(error: BaseException) -> str:
    """An exception in one line: what it is, and where in the user's own files it was raised."""
    if isinstance(error, UserError):
        return str(error)
    frames, files = traceback.extract_tb(error.__traceback__), user_files()
    frame = next((one for one in reversed(frames) if one.filename in files), frames[-1] if frames else None)
    where = "" if frame is None else f" ({frame.filename}:{frame.lineno})"
    said = quoted(str(error), 200)[1:-1]
    what = "" if isinstance(error, OutsideError) else f"it raised {type(error).__name__}: "
    return f"{what}{said}{where}"


# What a policy in training writes. None of it does harm to a tool that changes something.
_TEXTS = ("?", "0", "-1", "nothing", "two words", '"', "(", "[1, 2]", "%s", "\N{SNOWMAN}\n\0", "x" * 2000)
_NUMBERS = (0, -1, 2**53)
_MOST_JUNK = 40
_MOST_REQUESTS = 8  # different requests to one tool, where its schema offers values to choose from
_ROUNDS = 3
_SEED = 7


def check_tool(env: ToolUseEnv, tool: Tool, question: str) -> Check:
    """The tool answers within its deadline, a second time, and to junk. A refusal counts as an answer."""
    name, request = f"tool {tool.name}", next(requests(tool, question))
    fresh = env.spawn()
    fresh.begin_episode(0)
    first = None
    try:
        for asked in (request, request, *itertools.islice(_junk(tool), _MOST_JUNK)):
            outcome = fresh.toolbox.call(asked)
            if problem := _problem(name, asked, outcome):
                return problem
            first = first or outcome
    finally:
        fresh.end_episode()
    assert isinstance(first, ToolCall)
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
    what = str(outcome) if outcome.__cause__ is None else raised(outcome.__cause__)
    advice = "raise ToolInputError, whose text the policy then reads"
    return Check(name, False, f"asked for {asked}: {what}; {advice}")


def check_episodes(env: ToolUseEnv) -> Check:
    """Two episodes whose tool calls alternate must get the replies that each of them gets alone.

    Rollouts run many episodes at once. A tool that keeps state without offering ``new_episode`` mixes them up, and only
    a comparison shows it.
    """
    question = env.examples.examples[0].question
    # No other check uses these words, so the replies do not depend on what an earlier check left in a tool.
    scripts = [_script(env.toolbox.tools, f"{question} ({part})") for part in ("first", "second")]
    try:
        alone = [_replies(env, [script])[0] for script in scripts]
        together = _replies(env, scripts)
    except ToolUnavailableError as error:
        return Check("episodes", False, f"could not be checked: {error}")
    for script, expected, seen in zip(scripts, alone, together, strict=True):
        for request, one, other in zip(script, expected, seen, strict=True):
            if one != other:
                said = (
                    f"tool {request.tool} replies {one[:60]!r} to {request.argument[:60]!r} at first, and "
                    f"{other[:60]!r} in a later episode with the same calls: it remembers earlier episodes, shares "
                    "such a memory, or draws at random. Give it new_episode, which must not share anything that "
                    "changes (docs/add_a_tool.md)"
                )
                return Check("episodes", False, said)
    kept = ", ".join(sorted(env.toolbox.stateful))
    said = f"; {kept} keeps a state of its own in each" if kept else ""
    return Check("episodes", True, f"two at the same time get the same replies as each alone{said}")


def _replies(root: ToolUseEnv, scripts: Sequence[Sequence[ToolRequest]]) -> list[list[str]]:
    """The replies to each script, played in episodes of the same seed whose calls alternate."""
    envs = [root.spawn() for _ in scripts]
    seen: list[list[str]] = [[] for _ in envs]
    try:
        for env in envs:
            env.reset(seed=_SEED, options={"index": 0})
        for requests_ in zip(*scripts, strict=True):
            for env, request, replies in zip(envs, requests_, seen, strict=True):
                outcome = env.toolbox.call(request)
                if isinstance(outcome, ToolUnavailableError):
                    raise outcome
                replies.append(outcome.reply)
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
    for values in itertools.product(*(_sample_values(properties.get(name, {}), text) for name in names)):
        yield ToolRequest(tool.name, json.dumps(dict(zip(names, values, strict=True))))


def _sample_values(schema: Mapping[str, Any], text: str) -> Sequence[Any]:
    if "enum" in schema:
        return list(schema["enum"])
    if "anyOf" in schema:
        return _sample_values(schema["anyOf"][0], text)
    number = schema.get("minimum", 1)
    values = {"string": text, "integer": number, "number": number, "boolean": True, "array": [], "object": {}}
    return [values.get(schema.get("type", "string"))]


def _junk(tool: Tool) -> Iterator[ToolRequest]:
    """Requests that the schema allows, with texts and numbers that no question needs."""
    if takes_raw_text(tool.schema):
        yield from (ToolRequest(tool.name, text) for text in _TEXTS)
        return
    yield from (next(requests(tool, text)) for text in _TEXTS)
    properties = tool.schema["properties"]
    numbers = [name for name, one in properties.items() if one.get("type") in ("integer", "number")]
    for request in itertools.islice(requests(tool, "?"), len(_TEXTS)):
        for values in itertools.product(_NUMBERS, repeat=min(len(numbers), 2)):
            given = dict(zip(numbers, values, strict=False))
            yield ToolRequest(tool.name, json.dumps(json.loads(request.argument) | given))
