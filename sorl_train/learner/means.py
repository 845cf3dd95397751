"""Running means of a training step's metrics over its optimizer steps."""

from __future__ import annotations

import math
from collections import defaultdict

PEAKS = ("grad_norm", "clip_bias_norm")  # metrics whose largest value is reported beside their mean


class Means:
    """Running means of metrics by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values[name].append(value)

    def any(self, name: str) -> bool:
        """Whether a value other than 0 was added."""
        return any(self._values[name])

    def result(self, prefix: str = "loss/") -> dict[str, float]:
        """The means, the largest values of ``PEAKS`` and the number of optimizer steps."""
        means = {prefix + name: math.fsum(values) / len(values) for name, values in self._values.items()}
        peaks = {f"{prefix}{name}_max": max(self._values[name]) for name in PEAKS if name in self._values}
        steps = {prefix + "policy_updates": float(len(self._values["lr"]))} if "lr" in self._values else {}
        return means | peaks | steps
