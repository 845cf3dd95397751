"""The report's sections, the figures of each, and the metrics that a figure draws: ``assets/figures.yaml``.

A metric that no figure draws gets a figure of its own in the page's last section, so what only some runs log, such as
the age of replayed trajectories, needs no entry there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml


@dataclass(frozen=True)
class Figure:
    """One plot over training steps.

    Attributes:
        about: what it shows or what to look for, in a sentence.
        metrics: names with their labels; only the first is shown where several groups share a plot.
        axis: ``share`` runs from 0 to 1; ``log`` interrupts a line where a value is not positive.
        marks: ``alarms`` marks the steps with a collapse alarm; ``delta`` draws ``loss.clip_bias_delta``, the norm
            above which steps are scaled down, if it is the same in all runs that normalize.
    """

    title: str
    about: str
    metrics: Mapping[str, str]
    axis: Literal["linear", "log", "share"] = "linear"
    marks: Literal["", "alarms", "delta"] = ""

    @property
    def id(self) -> str:
        """Of its element in the page."""
        return self.title.lower().replace(" ", "-").replace("/", "-")


@dataclass(frozen=True)
class Section:
    """Figures under one heading. In ``outcome`` the line of a group keeps the last value of a run that ended early:
    otherwise its median would rise when a collapsed run is stopped."""

    name: str
    title: str
    about: str
    figures: tuple[Figure, ...]


def _sections() -> tuple[Section, ...]:
    file = Path(__file__).with_name("assets") / "figures.yaml"
    sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    return tuple(
        Section(**{**section, "figures": tuple(Figure(**figure) for figure in section["figures"])})
        for section in sections
    )


SECTIONS = _sections()
