"""What environments share: the space of their texts, what a step returns, and when an episode ends without an answer.

``limits.max_seconds`` bounds the whole time, but the policy is responsible only for its own part. An episode that is
late because its tools were slow says as little about the policy as one whose tool was unavailable, so both end with the
stop reason ``error``.
"""

from __future__ import annotations

import multiprocessing
import string
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Text
from gymnasium.vector.utils import create_shared_memory

from sorl_env.parser import ParsedTurn
from sorl_env.task import Limits
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason

_SAMPLED = string.ascii_letters + string.digits + " .,?!'-<>/äßøπшжの漢"


class UnicodeText(Text):
    """Any Python string, of any length. ``sample`` draws short lines of letters, markup signs and non-ASCII text.

    >>> "<answer>naïve</answer>" in UnicodeText()
    True
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length=64, min_length=1, charset=_SAMPLED, seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UnicodeText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)


@create_shared_memory.register(UnicodeText)
def _refuse(space: UnicodeText, n: int = 1, ctx: Any = multiprocessing) -> Any:
    """Let ``AsyncVectorEnv`` ask for ``shared_memory=False``: the arrays that it shares hold texts of one length."""
    raise CustomSpaceError("a text of any length fits no shared memory")


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


class EpisodeClock:
    """Times one episode. Call ``ask`` before and ``answered`` after each wait for tools."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._asked = 0.0
        self._tool_s = 0.0

    def ask(self) -> None:
        """The wait for the turn's tools begins."""
        self._asked = time.monotonic()

    def answered(self) -> None:
        """The wait for the turn's tools ends."""
        self._tool_s += time.monotonic() - self._asked

    def ending(self, turns: Sequence[ParsedTurn], limits: Limits) -> tuple[StopReason, str | None] | None:
        """Why the episode ends after the last of ``turns``, with the error of an outage; None if it goes on."""
        if len(turns) >= limits.max_turns:
            return (StopReason.INVALID if turns[-1].kind == "invalid" else StopReason.MAX_TURNS), None
        if limits.max_seconds is None:
            return None
        elapsed_s = time.monotonic() - self._started
        policy_s = elapsed_s - self._tool_s
        if policy_s >= limits.max_seconds:
            return StopReason.MAX_SECONDS, None
        if elapsed_s < limits.max_seconds:
            return None
        return StopReason.ERROR, (
            f"no time is left (limits.max_seconds={limits.max_seconds:g}): waiting for tools took "
            f"{self._tool_s:.3g} s, the policy {policy_s:.3g} s"
        )
