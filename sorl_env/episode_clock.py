"""The two clocks of an episode: its whole time, and the part that it spent waiting for tools.

``limits.max_seconds`` bounds the whole time, but the policy is responsible only for its own part. An episode that is
late because its tools were slow says as little about the policy as one whose tool was unavailable, so both end with the
stop reason ``error``.
"""

from __future__ import annotations

import time


class EpisodeClock:
    """Times one episode. Call ``ask`` before and ``answered`` after each wait for tools.

    Attributes:
        tool_s: seconds that the episode has waited for tools, those of other episodes in the same batch included.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._asked = 0.0
        self.tool_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the episode began."""
        return time.monotonic() - self._started

    def ask(self) -> None:
        """The wait for the turn's tools begins."""
        self._asked = time.monotonic()

    def answered(self) -> None:
        """The wait for the turn's tools ends."""
        self.tool_s += time.monotonic() - self._asked

    def outage(self, max_seconds: float) -> str | None:
        """The error of a late episode that would be in time but for its tools; None where the policy itself is late."""
        policy_s = self.elapsed_s - self.tool_s
        if policy_s >= max_seconds:
            return None
        return (
            f"no time is left (limits.max_seconds={max_seconds:g}): waiting for tools took {self.tool_s:.3g} s, "
            f"the policy {policy_s:.3g} s"
        )
