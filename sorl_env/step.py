"""What an environment returns from a step: a named tuple with Gymnasium's five values, or a plain row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sorl_env.parser import ParsedTurn
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason

INVALID_TURN_OBSERVATION = (
    "\n\n<information>\nInvalid turn: write one think block, then exactly one tool or answer block, and nothing else.\n"
    "</information>\n\n"
)

# Rows are plain tuples, because a vector environment makes columns of them in half the time that dictionaries take.
EPISODE_INFO = tuple("example_id index question tools source split is_sample".split())
EpisodeRow = tuple[str, str, int, str, tuple[str, ...], str, str, bool]  # the prompt, then EPISODE_INFO

TURN_INFO = tuple("parsed format_error reward_items tool_calls turn stop_reason error example_id".split())
# observation, reward, terminated, truncated, then TURN_INFO
TurnRow = tuple[
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


def turn_row(
    turns: Sequence[ParsedTurn],
    calls: list[ToolCall],
    example_id: str,
    observation: str,
    items: dict[str, float],
    reason: StopReason | None = None,
    error: str | None = None,
) -> TurnRow:
    """The row of the last one of ``turns``; ``reason`` says why the episode ended, if it did."""
    parsed = turns[-1] if turns else None
    answered = reason is StopReason.ANSWER
    return (
        observation,
        float(sum(items.values())) if items else 0.0,
        answered,
        reason is not None and not answered,
        parsed,
        parsed.error.value if parsed is not None and parsed.error is not None else None,
        items,
        calls,
        len(turns) - 1,
        None if reason is None else reason.value,
        error,
        example_id,
    )


class StepResult(NamedTuple):
    """What ``step`` returns: Gymnasium's five values, in its order."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @classmethod
    def unavailable(cls, error: str) -> StepResult:
        """The end of an episode that could not begin, because its environment is unavailable."""
        return cls("", 0.0, False, True, {"stop_reason": StopReason.ERROR.value, "error": error})

    @classmethod
    def from_row(cls, row: TurnRow) -> StepResult:
        """The result for a row, with everything after the first four values as a dictionary."""
        # written out, which is faster than dict(zip(TURN_INFO, ...))
        text, reward, terminated, truncated, parsed, error, items, calls, turn, stop, outage, example = row
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
        return cls(text, reward, terminated, truncated, info)
