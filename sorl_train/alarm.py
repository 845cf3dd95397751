"""The collapse alarm: an online detector over the metrics of a run, which warns before success falls.

Four signals, each a figure with a limit. A run alarms in the first step in which one of them has been beyond its limit
for ``PERSISTENT`` steps in a row, or two are at the same time. What the limits were set on, and how well they do on
runs that they were not set on, is in docs/stability.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sorl_train.config import AlarmConfig
from sorl_train.metrics_log import append_line, read_jsonl
from sorl_train.run_dir import RunDir

PERSISTENT = 2
BASELINE = 3  # first training steps, whose median a gradient norm or an entropy is compared with


@dataclass(frozen=True)
class Alarm:
    """A collapse that announces itself.

    Attributes:
        step: that the alarm was raised in.
        since: first of the steps in a row with a signal beyond its limit; what came before it is good.
        reason: what was seen, for a person.
        signals: the figures behind it, by name.
    """

    step: int
    since: int
    reason: str
    signals: Mapping[str, float]

    def event(self, action: str) -> dict[str, Any]:
        """A line of ``events.jsonl``."""
        return {
            "step": self.step,
            "kind": "collapse_alarm",
            "reason": self.reason,
            "since": self.since,
            "action": action,
            "signals": {name: round(value, 6) for name, value in self.signals.items()},
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
        self._since: dict[str, int] = {}
        self._raised = False

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        """Take in a training step's metrics (null for what was not finite); the alarm, the one time it is raised."""
        if self._config.action == "off" or "loss/grad_norm" not in metrics:
            return None
        signals = self._signals(metrics)
        beyond = {name: value for name, value in signals.items() if not value <= self._limit(name)}
        self._since = {name: self._since.get(name, step) for name in beyond}
        lasting = any(step - since + 1 >= PERSISTENT for since in self._since.values())
        if self._raised or not (lasting or len(beyond) > 1):
            return None
        self._raised = True
        reason = "; ".join(_DESCRIBED[name].format(value=value) for name, value in beyond.items())
        return Alarm(step, min(self._since.values()), reason, beyond)

    def _limit(self, name: str) -> float:
        return float(getattr(self._config, name))

    def _signals(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        grad_norm = _number(metrics, "loss/grad_norm_max")
        entropy = _number(metrics, "loss/entropy")
        valid = _number(metrics, "rollout/valid_turn_rate")
        self._best_valid = max(self._best_valid, valid)
        signals = {
            "ratio_tail": math.sqrt(2.0 * _number(metrics, "loss/approx_kl")),
            "invalid_turns": self._best_valid - valid,
            "grad_norm": _relative(grad_norm, self._grad_norms),
            "entropy": abs(math.log(_relative(entropy, self._entropies) or 1e-9)),
        }
        for history, value in ((self._grad_norms, grad_norm), (self._entropies, entropy)):
            if len(history) < BASELINE and 0.0 < value < math.inf:  # groups of one reward have a gradient of zero
                history.append(value)
        return signals


_DESCRIBED = {
    "ratio_tail": "log-ratios to the old policy have a root mean square of {value:.2f}",
    "invalid_turns": "the share of valid turns is {value:.3f} below its best",
    "grad_norm": "the gradient norm is {value:.1f} times that of the first steps",
    "entropy": "the entropy has moved by a factor of e^{value:.2f} from that of the first steps",
}


def _number(metrics: Mapping[str, Any], name: str) -> float:
    """A metric, 0 where a run does not have it, infinite where it was not finite."""
    value = metrics.get(name, 0.0)
    return math.inf if value is None else float(value)


def _relative(value: float, first: list[float]) -> float:
    """``value`` over the median of the first ones; 1 as long as these are being gathered."""
    if len(first) < BASELINE:
        return 1.0
    return value / median(first)


def append_event(run_dir: RunDir, event: Mapping[str, Any]) -> None:
    """Append a line to ``events.jsonl``."""
    append_line(run_dir.events, json.dumps(event) + "\n")


def alarm_so_far(config: AlarmConfig, run_dir: RunDir, step: int) -> CollapseAlarm:
    """The alarm of a run that goes on after ``step``: it has seen the metrics up to there."""
    alarm = CollapseAlarm(config)
    if run_dir.metrics.is_file():
        for line in read_jsonl(run_dir.metrics):
            if line["step"] <= step:
                alarm.observe(line["step"], line)
    return alarm
