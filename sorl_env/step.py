"""What an environment returns from a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sorl_env.parser import ParsedTurn
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason


class StepResult(NamedTuple):
    """What ``step`` returns: Gymnasium's five values, in its order.

    ``info`` holds:

    - ``parsed`` (ParsedTurn), ``format_error`` (its error's value), ``turn``: the policy's turn and its number from 0;
    - ``reward_items``, ``tool_calls``: the rewards of the turn by name, and the records of its tool calls;
    - ``stop_reason``, ``error``: why the episode ended, and what was unavailable; None while it goes on;
    - ``example_id``.
    """

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
    def of_turn(
        cls,
        turns: Sequence[ParsedTurn],
        calls: list[ToolCall],
        example_id: str,
        observation: str,
        items: dict[str, float],
        reason: StopReason | None = None,
        error: str | None = None,
    ) -> StepResult:
        """The result of the last one of ``turns``; ``reason`` says why the episode ended, if it did."""
        parsed = turns[-1] if turns else None
        answered = reason is StopReason.ANSWER
        info = {
            "parsed": parsed,
            "format_error": parsed.error.value if parsed is not None and parsed.error is not None else None,
            "reward_items": items,
            "tool_calls": calls,
            "turn": len(turns) - 1,
            "stop_reason": None if reason is None else reason.value,
            "error": error,
            "example_id": example_id,
        }
        reward = float(sum(items.values())) if items else 0.0
        return cls(observation, reward, answered, reason is not None and not answered, info)
