"""When an episode ends without an answer: the two clocks of an episode, and its budget of turns.

``limits.max_seconds`` bounds the whole time, but the policy is responsible only for its own part. An episode that is
late because its tools were slow says as little about the policy as one whose tool was unavailable, so both end with the
stop reason ``error``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sorl_env.parser import ParsedTurn
from sorl_env.task import Limits
from sorl_env.trajectory import StopReason


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
