"""What the checks of ``sorl-doctor`` share: what is known of the run, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    """What is known of the run. Checks fill in the other attributes, on which later ones build.

    Attributes:
        index: the folder that the server at ``search.url`` should serve.
        new: whether the run begins a folder of its own, in which no other run may be.
        sound: ``data`` and ``model``, when they can be used.
    """

    config: TrainConfig
    index: Path | None = None
    new: bool = True
    task: Task | None = None
    limits: Limits | None = None
    shape: ModelShape | None = None
    sound: set[str] = field(default_factory=set)


Check = Callable[[Run], Iterator[Finding]]


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.is_dir():
        path = path.parent
    return path
