"""The collapse alarm: it reads a run's metrics step by step, and warns before success falls.

It computes five signals, each with a limit (``AlarmConfig``), and raises in the first step in which one is above its
limit. ``mean_update_distance`` warns early: how far a step's updates move the policy from the one that sampled the
batch, averaged over about the last ``MEMORY`` steps, where one step counts for at most ``SPIKE``. In healthy runs it
stays low even if single steps are extreme; in others it is high many steps before success falls. The other four signals
are means over ``WINDOW`` steps and react to sudden changes. docs/stability.md says on which runs the limits were
chosen, and how well they do on other runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sorl_train.config.run_settings import AlarmConfig

WINDOW = 3  # steps that sudden signals are averaged over
MEMORY = 50  # steps after which a step's weight in the mean update distance has fallen by a factor of e
SPIKE = 0.3  # the most that one step counts in the mean update distance: healthy runs have single steps far above it
CHANCE = 3.5  # standard errors of a share of turns that chance is held to explain
BASELINE = 3  # first training steps, whose gradient norms and entropies later steps are compared with

ALARM = "collapse_alarm"  # the kind of its events


@dataclass(frozen=True)
class Alarm:
    """Signs that the policy is about to collapse: the ``signals`` above their limits, by name, and in words."""

    step: int
    reason: str
    signals: Mapping[str, float]

    def signals_or_null(self) -> dict[str, float | None]:
        """For ``events.jsonl``, where a signal that is not finite is null, as in the metrics."""
        return {name: round(v, 6) if math.isfinite(v) else None for name, v in self.signals.items()}


class CollapseAlarm:
    """Watches a run with one call of ``observe`` after each step; raises at most one alarm.

    Its state follows from the metrics alone, so a resumed run restores it by observing them again.
    """

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._grad_norms: list[float] = []
        self._entropies: list[float] = []
        # shares of valid turns, and numbers of turns
        self._valid: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._best_valid = (0.0, 1.0)
        self._distance, self._steps_seen = 0.0, 0.0  # sums in which older steps have less weight
        self._recent: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._raised = False

    @property
    def mean_update_distance(self) -> float:
        """The mean update distance of the steps so far; 0 before the first."""
        return self._distance / self._steps_seen if self._steps_seen else 0.0

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        """Take in the metrics of a training step (None: not finite). Returns the alarm in the step that raises it."""
        if self._config.action == "off" or "loss/grad_norm" not in metrics:
            return None
        sudden = self._sudden(metrics)
        self._recent.append(sudden)
        kept = math.exp(-1.0 / MEMORY)  # the weight of a step falls by a factor of e in MEMORY steps
        self._distance = kept * self._distance + min(sudden["ratio_tail"], SPIKE)
        self._steps_seen = kept * self._steps_seen + 1.0
        # a trust region bounds this distance by design, and keeps it high at high rates, where it does no harm
        signals = {} if "loss/trust_kl" in metrics else {"mean_update_distance": self.mean_update_distance}
        signals |= {name: math.fsum(one[name] for one in self._recent) / WINDOW for name in sudden}
        signals["invalid_turns"] = self._fall_of_valid_turns(metrics)
        beyond = {name: value for name, value in signals.items() if value > getattr(self._config, name)}
        if self._raised or not beyond:
            return None
        self._raised = True
        reason = "; ".join(
            f"{_DESCRIBED[name].format(value=value)} (limit alarm.{name} = {getattr(self._config, name):g})"
            for name, value in beyond.items()
        )
        return Alarm(step, reason, beyond)

    def _sudden(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        grad_norm = _number(metrics, "loss/grad_norm_max")
        entropy = _number(metrics, "loss/entropy")
        signals = {
            "ratio_tail": math.sqrt(2.0 * _number(metrics, "loss/approx_kl")),
            "grad_norm": _relative(grad_norm, self._grad_norms, max),
            "entropy": abs(math.log(_relative(entropy, self._entropies, median) or 1e-9)),
        }
        for history, value in ((self._grad_norms, grad_norm), (self._entropies, entropy)):
            usable = 0.0 < value < math.inf  # where all rewards of a group are equal, the gradient is zero
            if usable and len(history) < BASELINE:
                history.append(value)
        return signals

    def _fall_of_valid_turns(self, metrics: Mapping[str, Any]) -> float:
        """How far the share of valid turns of the last ``WINDOW`` steps is below the best share so far, and 0 if chance
        explains it: of many steps of few turns, the best and the worst are far apart where nothing has changed."""
        share = _number(metrics, "rollout/valid_turn_rate")
        if share == math.inf:
            return share
        # earlier versions did not count turns: take a count so large that chance plays no part
        self._valid.append((share, _number(metrics, "rollout/turns", missing=1e12)))
        shares = [_pooled([*self._valid][-steps:]) for steps in range(1, len(self._valid) + 1)]
        self._best_valid = max(self._best_valid, *shares, key=lambda valid: valid[0] - _chance(0.5, valid[1]))
        (best, best_turns), (now, turns) = self._best_valid, shares[-1]
        middle = (best + now) / 2.0
        explained = _chance(middle, best_turns) + _chance(middle, turns)
        return best - now if len(shares) == WINDOW and best - now > explained else 0.0


def _pooled(valid: list[tuple[float, float]]) -> tuple[float, float]:
    """The share of valid turns over several steps, and the number of their turns."""
    turns = math.fsum(number for _, number in valid)
    return math.fsum(share * number for share, number in valid) / max(turns, 1.0), turns


def _chance(share: float, turns: float) -> float:
    """The most that chance is held to take away from a share of ``turns`` turns, or to add to it."""
    return CHANCE * math.sqrt(share * (1.0 - share) / turns) if turns else math.inf


_DESCRIBED = {
    "mean_update_distance": "updates move the policy too far: the running mean of the RMS log-ratio to the old policy "
    "is {value:.3f}",
    "ratio_tail": f"the RMS log-ratio to the old policy, over {WINDOW} steps, is {{value:.2f}}",
    "invalid_turns": f"the share of valid turns, over {WINDOW} steps, is {{value:.3f}} below its best value",
    "grad_norm": f"the gradient norm, over {WINDOW} steps, is {{value:.1f}} times the highest of the first steps",
    "entropy": f"the entropy, over {WINDOW} steps, differs by a factor of e^{{value:.2f}} from that of the first steps",
}


def _number(metrics: Mapping[str, Any], name: str, missing: float = 0.0) -> float:
    """A metric, or ``missing``; infinite if it was not finite (None if it was read from the log)."""
    value = metrics.get(name, missing)
    return float(value) if value is not None and math.isfinite(value) else math.inf


def _relative(value: float, first: list[float], of: Callable[[list[float]], float]) -> float:
    """``value`` divided by ``of(first)``, or 1 until there are ``BASELINE`` first values."""
    return 1.0 if len(first) < BASELINE else value / of(first)
