"""The figures of ``summary.json``."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COLLAPSED = 0.5  # a policy with less than this share of the best success has collapsed


@dataclass
class Summary:
    """Final and best figures, which grow with the run and are kept in its checkpoints.

    Attributes:
        evaluations_below: how many of the newest evaluations in a row were below ``COLLAPSED`` times the best.
        earlier_s: seconds before the last resume; earlier_rss_mb: peak memory before it.
        ahead: step and success of the policy in ``checkpoints/best`` where that is of a later step than the resumed
            checkpoint: a run that repeats itself comes to it again, and for another one it counts from that step on.
    """

    cold_start_success: float | None = None
    final_success: float | None = None
    best_success: float | None = None
    best_step: int | None = None
    search_off_success: float | None = None
    evaluations_below: int = 0
    earlier_s: float = 0.0
    earlier_rss_mb: float = 0.0
    started: float = field(default_factory=time.monotonic)
    ahead: tuple[int, float] | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take in the metrics of a step; True if its policy is to be kept as the best so far."""
        self.search_off_success = metrics.get("eval/search_off_success", self.search_off_success)
        success = metrics.get("eval/success")
        if success is None:
            return False
        self.final_success = success
        if step == 0:
            self.cold_start_success = success
        is_best = self.best_success is None or success > self.best_success
        if is_best:
            self.evaluations_below = 0
            self.best_success, self.best_step = success, step
        else:
            below = success < COLLAPSED * (self.best_success or 0.0)
            self.evaluations_below = self.evaluations_below + 1 if below else 0
        if self.ahead is None:
            return is_best
        if is_best and success >= self.ahead[1]:
            self.ahead = None
            return True
        if step >= self.ahead[0]:
            self._take_ahead()
        return False

    def _take_ahead(self) -> None:
        if self.ahead is not None:
            (self.best_step, self.best_success), self.ahead = self.ahead, None

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all resumes."""
        return self.earlier_s + time.monotonic() - self.started

    @property
    def peak_rss_mb(self) -> float:
        """The most memory that the process took, in MiB, over all resumes."""
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
        return max(self.earlier_rss_mb, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)

    def out_of_patience(self) -> str:
        """A message that says why ``eval.patience`` ended the run."""
        return (
            f"ended early (eval.patience): success is {self.final_success:.3f}, and for {self.evaluations_below} "
            f"evaluations below half of the best, {self.best_success:.3f} at step {self.best_step}, whose policy is "
            "kept in checkpoints/best"
        )

    def figures(self) -> dict[str, Any]:
        """The figures for ``summary.json``, whose best policy is the one in ``checkpoints/best``."""
        self._take_ahead()
        names = ("cold_start_success", "final_success", "best_success", "best_step", "search_off_success")
        timed = {"wall_s": round(self.wall_s, 1), "peak_rss_mb": round(self.peak_rss_mb, 1)}
        return {name: getattr(self, name) for name in names} | timed

    def state(self) -> dict[str, Any]:
        """The fields as JSON values, for a checkpoint."""
        state = dataclasses.asdict(self) | {"earlier_s": self.wall_s, "earlier_rss_mb": self.peak_rss_mb}
        return {name: value for name, value in state.items() if name not in ("started", "ahead")}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Summary:
        """Inverse of ``state``."""
        return cls(**state)
