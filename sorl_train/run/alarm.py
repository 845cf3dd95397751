"""The collapse alarm: an online detector over the metrics of a run, which warns before success falls.

Five signals, each a figure with a limit; a run alarms in the first step in which one of them is beyond its limit.
``strain`` is the early one: how far a step's updates take the policy from the one that sampled, on average over the
last ``MEMORY`` steps or so, each counted as at most ``SPIKE``. It is small for as long as a run can go on, whatever a
single step does, and high many steps before success falls. The other four are means over ``WINDOW`` steps, and see
what is sudden. What the limits were set on, and how well they do on runs that they were not set on, is in
docs/stability.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sorl_train.config.settings import AlarmConfig

WINDOW = 3  # steps that sudden signals are averaged over
MEMORY = 50  # steps after which a step's part in the strain has fallen by a factor of e
SPIKE = 0.3  # what one step counts for in the strain at most: healthy runs have lone steps far above that
BASELINE = 3  # first training steps, with which gradient norms and entropies are compared


@dataclass(frozen=True)
class Alarm:
    """A collapse that announces itself.

    Attributes:
        step: that the alarm was raised in.
        since: first of the last ``WINDOW`` steps; what came before it is taken to be good.
        reason: what was seen, for a person.
        signals: those that are beyond their limits, by name.
    """

    step: int
    since: int
    reason: str
    signals: Mapping[str, float]

    def event(self, action: str) -> dict[str, Any]:
        """A line of ``events.jsonl``; a signal that is not finite is null there, as in the metrics."""
        return {
            "step": self.step,
            "kind": "collapse_alarm",
            "reason": self.reason,
            "since": self.since,
            "action": action,
            "signals": {
                name: round(value, 6) if math.isfinite(value) else None
                for name, value in self.signals.items()
            },
        }


class CollapseAlarm:
    """Watches a run, one call of ``observe`` a step; raises at most one alarm.

    It holds nothing that the metrics of the steps so far do not say: a resumed run observes them again.
    """

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._grad_norms: list[float] = []
        self._entropies: list[float] = []
        self._best_valid = 0.0
        self._strain, self._steps_seen = 0.0, 0.0  # sums in which older steps count for less
        self._recent: deque[tuple[int, dict[str, float]]] = deque(maxlen=WINDOW)
        self._raised = False

    @property
    def strain(self) -> float:
        """That of the steps so far, 0 before the first."""
        return self._strain / self._steps_seen if self._steps_seen else 0.0

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        """Take in a training step's metrics (null for what was not finite); the alarm, the one time it is raised."""
        if self._config.action == "off" or "loss/grad_norm" not in metrics:
            return None
        sudden = self._sudden(metrics)
        self._recent.append((step, sudden))
        self._add_strain(sudden["ratio_tail"])
        signals = {"strain": self.strain}
        signals |= {name: math.fsum(one[name] for _, one in self._recent) / WINDOW for name in sudden}
        beyond = {name: value for name, value in signals.items() if value > getattr(self._config, name)}
        if self._raised or not beyond:
            return None
        self._raised = True
        reason = "; ".join(_DESCRIBED[name].format(value=value) for name, value in beyond.items())
        return Alarm(step, self._recent[0][0], reason, beyond)

    def _add_strain(self, ratio_tail: float) -> None:
        """To the mean of the steps so far, in which a step's weight falls by e in ``MEMORY`` steps."""
        kept = math.exp(-1.0 / MEMORY)
        self._strain = kept * self._strain + min(ratio_tail, SPIKE)
        self._steps_seen = kept * self._steps_seen + 1.0

    def _sudden(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        grad_norm = _number(metrics, "loss/grad_norm_max")
        entropy = _number(metrics, "loss/entropy")
        valid = _number(metrics, "rollout/valid_turn_rate")
        self._best_valid = max(self._best_valid, valid)
        signals = {
            "ratio_tail": math.sqrt(2.0 * _number(metrics, "loss/approx_kl")),
            "invalid_turns": self._best_valid - valid,
            "grad_norm": _relative(grad_norm, self._grad_norms, max),
            "entropy": abs(math.log(_relative(entropy, self._entropies, median) or 1e-9)),
        }
        for history, value in ((self._grad_norms, grad_norm), (self._entropies, entropy)):
            if (
                len(history) < BASELINE and 0.0 < value < math.inf
            ):  # groups of one reward have a gradient of zero
                history.append(value)
        return signals


_DESCRIBED = {
    "strain": "on average a step's updates took the log-ratios to the old policy to a root mean square of {value:.3f}",
    "ratio_tail": f"over {WINDOW} steps the log-ratios to the old policy had a root mean square of {{value:.2f}}",
    "invalid_turns": f"over {WINDOW} steps the share of valid turns was {{value:.3f}} below its best",
    "grad_norm": f"over {WINDOW} steps the gradient norm was {{value:.1f}} times the highest of the first steps",
    "entropy": f"over {WINDOW} steps the entropy was off by a factor of e^{{value:.2f}} from that of the first steps",
}


def _number(metrics: Mapping[str, Any], name: str) -> float:
    """A metric, 0 where a run does not have it, infinite where it was not finite (null once it was written)."""
    value = metrics.get(name, 0.0)
    return float(value) if value is not None and math.isfinite(value) else math.inf


def _relative(value: float, first: list[float], of: Callable[[list[float]], float]) -> float:
    """``value`` over one ``of`` the first ones; 1 as long as these are being gathered."""
    return 1.0 if len(first) < BASELINE else value / of(first)
