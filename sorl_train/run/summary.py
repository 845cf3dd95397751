"""The figures of ``summary.json``."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COLLAPSED = 0.5  # of the best success: a policy below has collapsed


@dataclass
class Summary:
    """Final and best figures, gathered as the run goes on and kept in its checkpoints.

    ``earlier_s`` and ``earlier_rss_mb`` come from the sessions before a resume.
    """

    cold_start_success: float | None = None
    final_success: float | None = None
    best_success: float | None = None
    best_step: int | None = None
    search_off_success: float | None = None
    evaluations_below: int = 0  # newest ones in a row below half of the best
    earlier_s: float = 0.0
    earlier_rss_mb: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take in a step's metrics; True when its evaluation is the best so far."""
        self.search_off_success = metrics.get("eval/search_off_success", self.search_off_success)
        success = metrics.get("eval/success")
        if success is None:
            return False
        self.final_success = success
        if step == 0:
            self.cold_start_success = success
        if self.best_success is not None and success <= self.best_success:
            below = success < COLLAPSED * self.best_success
            self.evaluations_below = self.evaluations_below + 1 if below else 0
            return False
        self.evaluations_below = 0
        self.best_success, self.best_step = success, step
        return True

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.started

    @property
    def peak_rss_mb(self) -> float:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
        return max(self.earlier_rss_mb, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)

    def figures(self) -> dict[str, Any]:
        """What ``summary.json`` shows."""
        names = ("cold_start_success", "final_success", "best_success", "best_step", "search_off_success")
        timed = {"wall_s": round(self.wall_s, 1), "peak_rss_mb": round(self.peak_rss_mb, 1)}
        return {name: getattr(self, name) for name in names} | timed

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        state = dataclasses.asdict(self) | {"earlier_s": self.wall_s, "earlier_rss_mb": self.peak_rss_mb}
        del state["started"]
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Summary:
        return cls(**state)


def out_of_patience(summary: Summary) -> str:
    """Why ``eval.patience`` ended the run, for a person."""
    return (
        f"ended early: success {summary.final_success:.3f}, for {summary.evaluations_below} evaluations below half of "
        f"the best, {summary.best_success:.3f} at step {summary.best_step}, whose policy is kept (eval.patience)"
    )
