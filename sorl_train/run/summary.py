"""The figures of ``summary.json``."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COLLAPSED = 0.5  # a policy with less than this share of the best success has collapsed


@dataclass
class Summary:
    """Final and best figures. They follow from the logged metrics: a resumed run observes those of its log again.

    Attributes:
        evaluations_below: how many of the newest evaluations in a row were below ``COLLAPSED`` times the best.
        saved: step and success of the policy in ``checkpoints/best`` when the run was resumed. It may be of a later
            step than the resumed checkpoint; no worse policy takes its place.
        earlier_s: seconds before the last resume.
    """

    cold_start_success: float | None = None
    final_success: float | None = None
    best_success: float | None = None
    best_step: int | None = None
    search_off_success: float | None = None
    evaluations_below: int = 0
    saved: tuple[int, float] | None = None
    earlier_s: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take in the metrics of a step; True if its policy is to be kept as the best so far."""
        self.search_off_success = metrics.get("eval/search_off_success", self.search_off_success)
        success = metrics.get("eval/success")
        if success is None:
            return False
        self.final_success = success
        if step == 0:
            self.cold_start_success = success
        if self.best_success is None or success > self.best_success:
            self.evaluations_below = 0
            self.best_success, self.best_step = success, step
            return self.saved is None or success >= self.saved[1]
        below = success < COLLAPSED * self.best_success
        self.evaluations_below = self.evaluations_below + 1 if below else 0
        return False

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all resumes."""
        return self.earlier_s + time.monotonic() - self.started

    def out_of_patience(self) -> str:
        """A message that says why ``eval.patience`` ended the run."""
        return (
            f"ended early (eval.patience): success is {self.final_success:.3f}, and for {self.evaluations_below} "
            f"evaluations below half of the best, {self.best_success:.3f} at step {self.best_step}, whose policy is "
            "kept in checkpoints/best"
        )

    def figures(self) -> dict[str, Any]:
        """The figures for ``summary.json``, whose best policy is the one in ``checkpoints/best``.

        ``peak_rss_mb`` is the most memory, in MiB, that the process took since the last resume.
        """
        step, best = self.best_step, self.best_success
        if self.saved is not None and (best is None or best < self.saved[1]):
            step, best = self.saved
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
        return {
            "cold_start_success": self.cold_start_success,
            "final_success": self.final_success,
            "best_success": best,
            "best_step": step,
            "search_off_success": self.search_off_success,
            "wall_s": round(self.wall_s, 1),
            "peak_rss_mb": round(memory, 1),
        }
