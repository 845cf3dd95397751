"""Show how far a long command is and when it will be done."""

from __future__ import annotations

import sys

from tqdm import tqdm

LOG_EVERY_S = 10.0  # between two lines where standard error is not a terminal


class Progress:
    """A bar of tqdm on standard error for each stage of a command; none if ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar = tqdm(disable=True)

    def start(self, stage: str, total: int, done: int = 0) -> None:
        """Begin a stage of ``total`` items (0 if unknown), of which ``done`` were done in an earlier run."""
        self._bar.close()
        self._bar = tqdm(
            desc=stage,
            total=total or None,
            initial=done,
            unit="",
            unit_scale=True,
            mininterval=0.1 if sys.stderr.isatty() else LOG_EVERY_S,
            disable=self._quiet,
        )

    def advance(self, count: int) -> None:
        """Count ``count`` more items as done."""
        self._bar.update(count)

    def close(self) -> None:
        """End the last stage."""
        self._bar.close()
