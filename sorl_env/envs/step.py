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

from sorl_env.task.task import Limits
from sorl_env.tool.tool import ToolCall
from sorl_env.trajectory.trajectory import StopReason
from sorl_env.turns.tags import ParsedTurn

_SAMPLED = string.ascii_letters + string.digits + " .,?!'-<>/äßøπшжの漢"


class UnicodeText(Text):
    """Any Python string, of any length. ``sample`` draws short lines of letters, markup signs and non-ASCII text.

    >>> "<answer>naïve</answer>" in UnicodeText()
    True
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length=64, min_length=1, charset=_SAMPLED, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no fixed length."""
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
    """What Gymnasium's ``step`` returns. ``info`` holds the fields of ``TurnInfo`` except the observation, with
    ``stop_reason`` as text, and also ``format_error`` and ``example_id``."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class TurnInfo(NamedTuple):
    """The environment's reply to a turn of the policy.

    Attributes:
        observation: what the policy reads next; empty after the last turn.
        parsed, turn: the policy's turn and its number from 0; None and -1 where the episode ended before it began.
        reward_items: rewards of the turn by name.
        tool_calls: records of the turn's tool calls.
        stop_reason: why the episode ended; None while it goes on.
        error: what was unavailable or failed, for ``StopReason.ERROR``.
    """

    observation: str
    parsed: ParsedTurn | None
    turn: int
    reward_items: dict[str, float]
    tool_calls: list[ToolCall]
    stop_reason: StopReason | None = None
    error: str | None = None

    @property
    def reward(self) -> float:
        """Sum of the reward items."""
        return float(sum(self.reward_items.values()))

    @property
    def terminated(self) -> bool:
        """The policy answered."""
        return self.stop_reason is StopReason.ANSWER

    @property
    def ended(self) -> bool:
        """The episode ended, by an answer or otherwise."""
        return self.stop_reason is not None

    @property
    def format_error(self) -> str | None:
        """The parser's error code; None for a valid turn."""
        return None if self.parsed is None or self.parsed.error is None else self.parsed.error.value

    def for_gymnasium(self, example_id: str) -> StepResult:
        """The same as the five values of ``step``."""
        observation, parsed, turn, items, calls, reason, error = self
        info = {
            "parsed": parsed,
            "format_error": None if parsed is None or parsed.error is None else parsed.error.value,
            "reward_items": items,
            "tool_calls": calls,
            "turn": turn,
            "stop_reason": None if reason is None else reason.value,
            "error": error,
            "example_id": example_id,
        }
        reward, answered = self.reward if items else 0.0, reason is StopReason.ANSWER
        return StepResult(observation, reward, answered, reason is not None and not answered, info)


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
