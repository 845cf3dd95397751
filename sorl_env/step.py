"""What an environment returns: Gymnasium's five values, or the same as a plain row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sorl_env.parser import ParsedTurn
from sorl_env.tool import ToolCall

INVALID_TURN_OBSERVATION = (
    "\n\n<information>\nInvalid turn: write one think block, then exactly one tool or answer block, and nothing else.\n"
    "</information>\n\n"
)

# Rows are plain tuples: a vector environment makes columns of them in half the time that dictionaries take.
EPISODE_INFO = ("example_id", "index", "question", "tools", "source", "split", "is_sample")
EpisodeRow = tuple[str, str, int, str, tuple[str, ...], str, str, bool]  # the prompt, then EPISODE_INFO

TURN_INFO = (
    "parsed",
    "format_error",
    "reward_items",
    "tool_calls",
    "turn",
    "stop_reason",
    "error",
    "example_id",
)
TurnRow = tuple[  # observation, reward, terminated, truncated, then TURN_INFO
    str,
    float,
    bool,
    bool,
    ParsedTurn | None,
    str | None,
    dict[str, float],
    list[ToolCall],
    int,
    str | None,
    str | None,
    str,
]


class StepResult(NamedTuple):
    """What ``step`` returns: Gymnasium's five, in its order."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @classmethod
    def from_row(cls, row: TurnRow) -> StepResult:
        """The row with its tail as a dictionary."""
        (
            observation,
            reward,
            terminated,
            truncated,
            parsed,
            error,
            items,
            calls,
            turn,
            stop,
            outage,
            example,
        ) = row
        info = {
            "parsed": parsed,
            "format_error": error,
            "reward_items": items,
            "tool_calls": calls,
            "turn": turn,
            "stop_reason": stop,
            "error": outage,
            "example_id": example,
        }
        return cls(observation, reward, terminated, truncated, info)


@dataclass(frozen=True)
class EnvState:
    """An episode, to be restored by ``set_state`` in any environment of the same task and data. Picklable."""

    example_id: str
    index: int
    phase: str
    turns: tuple[ParsedTurn, ...]
    dialogue: tuple[tuple[str, str], ...]
    calls: tuple[ToolCall, ...]
    items: Mapping[str, float]
    elapsed_s: float
    tool_s: float
    tool_seed: int
    tools: Mapping[str, Any]  # by name, the states of those that keep one
    seed: int | None
    rng_state: Mapping[str, Any] | None
