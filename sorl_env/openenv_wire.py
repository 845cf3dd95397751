"""What travels between ``sorl-serve-env`` and ``openenv:URL`` beside OpenEnv's own protocol, so that nothing is lost.

OpenEnv gives a text, a reward and ``done``. A task here also says how the policy's turn was read, what each reward is
for, which tools were called, and whether an episode ended because a tool was out. All of this goes into the metadata of
an observation, under the key ``sorl``. Other clients need not read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sorl_env.parser import FormatError, ParsedTurn
from sorl_env.session_env import Reply
from sorl_env.step import StepResult
from sorl_env.task import Limits
from sorl_env.text_env import TextEnv
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason

KEY = "sorl"
PROTOCOL = 1


def facts_of(env: TextEnv, splits: tuple[str, ...]) -> dict[str, Any]:
    """What a client has to know of a task before its first episode, as JSON values."""
    return {
        "protocol": PROTOCOL,
        "task": env.task.name,
        "description": env.task.description,
        "system_prompt": env.task.system_prompt,
        "stop": list(env.stop),
        "limits": dataclasses.asdict(env.limits),
        "splits": list(splits),
    }


def limits_of(facts: Mapping[str, Any]) -> Limits:
    """The limits among the facts. Raises ``ValueError`` or ``TypeError`` if they are none."""
    return Limits(**facts["limits"])


def result_to_json(result: StepResult) -> dict[str, Any]:
    """A step's result without its observation, as JSON values."""
    info = result.info
    parsed: ParsedTurn | None = info.get("parsed")
    return {
        "terminated": result.terminated,
        "truncated": result.truncated,
        "parsed": None if parsed is None else parsed._asdict(),
        "reward_items": dict(info.get("reward_items", {})),
        "tool_calls": [call._asdict() for call in info.get("tool_calls", ())],
        "stop_reason": info.get("stop_reason"),
        "error": info.get("error"),
    }


def reply_from_json(text: str, reward: float, record: Mapping[str, Any]) -> Reply:
    """Inverse of ``result_to_json``.

    Raises:
        ValueError, TypeError, KeyError: the record is not of that form.
    """
    parsed, reason = record["parsed"], record["stop_reason"]
    if parsed is not None:
        error = parsed["error"]
        parsed = ParsedTurn(**{**parsed, "error": None if error is None else FormatError(error)})
    return Reply(
        text,
        reward,
        terminated=record["terminated"] is True,
        truncated=record["truncated"] is True,
        parsed=parsed,
        reward_items={str(name): float(value) for name, value in record["reward_items"].items()},
        tool_calls=[ToolCall(**call) for call in record["tool_calls"]],
        stop_reason=None if reason is None else StopReason(reason),
        error=record["error"],
    )
