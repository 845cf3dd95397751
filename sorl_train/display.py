"""What a person sees of a run: one aligned line a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO


class Display(Protocol):
    """What the trainer tells a person."""

    def start(self, title: str, steps: int, first_step: int = 0) -> None:
        """A run of ``steps`` steps begins, ``first_step`` of which are done already."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (1-based) is done."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A context for one part of a step (rollout, update, evaluation); call its value with units of progress."""

    def message(self, text: str) -> None:
        """A line that stays."""

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        """The end; with a summary, print it."""


class PlainDisplay:
    """One line a step to a stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._steps = 0

    def start(self, title: str, steps: int, first_step: int = 0) -> None:
        self._steps = steps
        self.message(title)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.message(f"step {step}/{self._steps}  " + "  ".join(f"{k} {v:.4g}" for k, v in metrics.items()))

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: None

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        for name, value in (summary or {}).items():
            self.message(f"{name:24} {value}")
