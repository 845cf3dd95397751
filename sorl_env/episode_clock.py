"""The two clocks of an episode: all of its time, and that which it spent waiting for tools.

``limits.max_seconds`` is a budget for both together, but only the policy is to blame for its own part. An episode that
is late because its tools were slow says as little about the policy as one whose tool was out, and ends in the same way.
"""

from __future__ import annotations

import time


class EpisodeClock:
    """Times one episode; ``ask`` and ``answered`` stand before and after each wait for tools.

    Attributes:
        tool_s: seconds that the episode has waited for tools, its own and those of the others in its batch.
    """

    def __init__(self, elapsed_s: float = 0.0, tool_s: float = 0.0) -> None:
        self._started = time.monotonic() - elapsed_s
        self._asked = 0.0
        self.tool_s = tool_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the episode began."""
        return time.monotonic() - self._started

    def ask(self) -> None:
        """The turn's tool requests go out now."""
        self._asked = time.monotonic()

    def answered(self) -> None:
        """Their outcomes are here."""
        self.tool_s += time.monotonic() - self._asked

    def outage(self, max_seconds: float) -> str | None:
        """For an episode that is late: what to say where it would be in time but for its tools, else None."""
        policy_s = self.elapsed_s - self.tool_s
        if policy_s >= max_seconds:
            return None
        return (
            f"no time is left (limits.max_seconds={max_seconds:g}): waiting for tools took {self.tool_s:.3g} s, "
            f"the policy {policy_s:.3g} s"
        )
