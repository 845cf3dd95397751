"""What the checks of ``sorl-doctor`` share: a run as far as it is known, and what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sorl_env.task import Limits, Task
from sorl_train.config.settings import TrainConfig
from sorl_train.models.shape import ModelShape

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a check found; ``fix`` says what to do about it."""

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass
class Run:
    """What is known of the run so far: checks add to it."""

    config: TrainConfig
    index: Path | None = None
    task: Task | None = None
    limits: Limits | None = None
    shape: ModelShape | None = None
    new: bool = True


Check = Callable[[Run], Iterator[Finding]]


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.is_dir():
        path = path.parent
    return path
