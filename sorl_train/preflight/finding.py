"""What the checks before a run share: what is known of the run, and what they find."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sorl_env.task import Task
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import ModelShape

_WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """What a check found; ``fix`` says what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""

    def as_text(self) -> str:
        """A line, with the fix indented below."""
        head = f"{self.status:<5} {self.name:<10} "
        lines = textwrap.wrap(self.detail, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if self.fix:
            arrow = " " * len(head) + "-> "
            lines += textwrap.wrap(self.fix, _WIDTH, initial_indent=arrow, subsequent_indent=" " * len(arrow))
        return "\n".join(lines)


@dataclass
class Run:
    """What is known of the run. Checks fill in the last three attributes, on which later ones build.

    Attributes:
        index: the folder that the server at ``search.url`` should serve.
        new: whether the run begins a folder of its own, in which no other run may be.
        failed: whether a check has failed.
    """

    config: TrainConfig
    index: Path | None = None
    new: bool = True
    task: Task | None = None
    shape: ModelShape | None = None
    failed: bool = False
