"""The collapse alarm: signals by hand. Recorded runs are in tests/train/lab/test_alarm.py."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from sorl_train.config.run_settings import AlarmConfig
from sorl_train.run.alarm import BASELINE, MEMORY, SPIKE, CollapseAlarm

LIMITS = AlarmConfig(mean_update_distance=9.0, ratio_tail=1.0, invalid_turns=0.1, grad_norm=10.0, entropy=1.0)
CALM = {
    "loss/grad_norm": 0.1,
    "loss/grad_norm_max": 0.2,
    "loss/entropy": 0.5,
    "loss/approx_kl": 0.02,
    "rollout/valid_turn_rate": 0.95,
}


def observe(alarm: CollapseAlarm, steps: list[dict[str, Any]]) -> list[int]:
    return [step for step, changed in enumerate(steps, start=1) if alarm.observe(step, CALM | changed)]


@pytest.mark.parametrize(
    ("once", "lasting"),
    [
        ({"loss/approx_kl": 0.9}, {"loss/approx_kl": 0.6}),
        ({"rollout/valid_turn_rate": 0.7}, {"rollout/valid_turn_rate": 0.8}),
        ({"loss/grad_norm_max": 5.0}, {"loss/grad_norm_max": 2.5}),
        ({"loss/entropy": 0.1}, {"loss/entropy": 0.15}),
        ({"loss/entropy": 4.0}, {"loss/entropy": 2.0}),
    ],
)
def test_a_signal_alarms_once_it_lasts(once: dict[str, Any], lasting: dict[str, Any]) -> None:
    """A step beyond the limit does not; three in a row do, once."""
    start = [{}] * BASELINE
    assert observe(CollapseAlarm(LIMITS), [*start, once, {}, {}]) == []
    assert observe(CollapseAlarm(LIMITS), [*start, *[lasting] * 6]) == [BASELINE + 3]
    assert observe(CollapseAlarm(dataclasses.replace(LIMITS, action="off")), [*start, *[lasting] * 6]) == []


def test_steps_without_an_update_or_a_gradient_say_nothing() -> None:
    silent = {"loss/grad_norm_max": 0.0}  # the baseline is made of steps with a gradient
    assert observe(CollapseAlarm(LIMITS), [silent, silent, silent, *[{}] * 50]) == []
    assert CollapseAlarm(LIMITS).observe(1, {"eval/success": 0.5}) is None


def far(*ratio_tails: float) -> list[dict[str, Any]]:
    """Steps with these root mean squares of the log-ratios."""
    return [{"loss/approx_kl": value**2 / 2.0} for value in ratio_tails]


def test_a_trust_region_is_not_strain_but_other_signs_alarm() -> None:
    """It keeps the ratios of a high rate near its limit for good, where they do no harm."""
    inside = [{**line, "loss/trust_kl": 0.005} for line in far(*[0.12] * 60)]
    assert observe(CollapseAlarm(AlarmConfig(mean_update_distance=0.07)), inside) == []
    assert observe(CollapseAlarm(AlarmConfig(mean_update_distance=0.07)), far(*[0.12] * 60)) == [1]
    forgotten = [{**line, "rollout/valid_turn_rate": 0.5} for line in inside[:6]]
    assert observe(CollapseAlarm(LIMITS), [*inside[:3], *forgotten]) != []


def test_strain_is_a_mean_in_which_older_steps_count_for_less() -> None:
    older = math.exp(-1.0 / MEMORY)
    mean = (older * 0.1 + 0.2) / (older + 1.0)
    for limit, raised in ((mean - 1e-6, [2]), (mean + 1e-6, [])):
        assert observe(CollapseAlarm(AlarmConfig(mean_update_distance=limit)), far(0.1, 0.2)) == raised


def test_lone_steps_are_no_strain_and_many_small_ones_are() -> None:
    """A step counts as at most SPIKE: (9 * .03 + .3) / 10 < .07. One of .08 after the other comes above it."""
    assert SPIKE == 0.3
    limits = AlarmConfig(mean_update_distance=0.07, ratio_tail=9.0)
    assert observe(CollapseAlarm(limits), far(*[0.03] * 9, 5.0, *[0.03] * 20)) == []
    (step,) = observe(CollapseAlarm(limits), far(*[0.03] * 9, *[0.08] * 50))
    assert 30 < step < 50  # without forgetting, 9 * .03 + n * .08 = (9 + n) * .07 has n = 36


def turns_of(share: float, turns: int, steps: int, draw: random.Random) -> list[dict[str, Any]]:
    """Steps with ``turns`` turns each, of which a ``share``, up to chance, is valid."""
    valid = [sum(draw.random() < share for _ in range(turns)) / turns for _ in range(steps)]
    return [{"rollout/valid_turn_rate": found, "rollout/turns": float(turns)} for found in valid]


def test_chance_is_no_fall_of_valid_turns_and_a_fall_is_found() -> None:
    """Few turns a step: compared with its best step alone, each of these steady runs fell by more than the limit."""
    draw, limits = random.Random(3), AlarmConfig(mean_update_distance=9.0)
    steady = [turns_of(share, turns, 200, draw) for share in (0.5, 0.7, 0.9) for turns in (8, 16, 32)] * 3
    assert [observe(CollapseAlarm(limits), steps) for steps in steady] == [[]] * 27
    best = [max(step["rollout/valid_turn_rate"] for step in steps) for steps in steady]
    worst = [min(step["rollout/valid_turn_rate"] for step in steps) for steps in steady]
    assert min(high - low for high, low in zip(best, worst, strict=True)) > limits.invalid_turns
    for turns, fall, within in ((16, 0.5, 4), (32, 0.3, 6), (1000, 0.3, 3)):
        steps = turns_of(0.95, turns, 40, draw) + turns_of(0.95 - fall, turns, 40, draw)
        (found,) = observe(CollapseAlarm(limits), steps)
        assert 40 < found <= 40 + within


def test_a_step_without_turns_says_nothing_about_them() -> None:
    nothing = {"rollout/valid_turn_rate": 0.0, "rollout/turns": 0.0}
    full = {"rollout/valid_turn_rate": 0.95, "rollout/turns": 100.0}
    assert observe(CollapseAlarm(LIMITS), [nothing, full, full, full, nothing, nothing, nothing, full]) == []


@pytest.mark.parametrize("value", [None, math.nan, math.inf])  # as it is read back, and as the step has it
def test_a_figure_that_is_not_finite_alarms_at_once(value: float | None) -> None:
    alarm = CollapseAlarm(LIMITS)
    assert observe(alarm, [{}]) == [] and alarm.mean_update_distance == pytest.approx(0.2)
    found = alarm.observe(2, CALM | {"loss/approx_kl": value})
    assert found is not None and math.isfinite(alarm.mean_update_distance)
    assert found.signals_or_null() == {"ratio_tail": None}
    assert "3 steps, is inf (limit alarm.ratio_tail = 1)" in found.reason


def test_an_alarm_says_why() -> None:
    alarm = CollapseAlarm(LIMITS)
    assert observe(alarm, [{}] * 4) == []
    beyond = CALM | {"loss/approx_kl": 2.0, "rollout/valid_turn_rate": 0.95 - 0.24}
    found = alarm.observe(5, beyond)  # root mean squares .2, .2, 2; shares .24, 0, 0
    assert found is None
    found = alarm.observe(6, beyond)
    assert found is not None and found.step == 6
    assert "RMS log-ratio to the old policy, over 3 steps, is 1.40" in found.reason
    assert "0.160 below its best" in found.reason
    assert found.signals_or_null() == pytest.approx({"ratio_tail": 1.4, "invalid_turns": 0.16})
