"""The collapse alarm: signals by hand, recorded runs, and what a run does about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_train.alarm import BASELINE, CollapseAlarm, append_event
from sorl_train.config import AlarmConfig
from sorl_train.metrics_log import read_jsonl
from sorl_train.run_dir import RunDir

LIMITS = AlarmConfig(ratio_tail=1.0, invalid_turns=0.1, grad_norm=10.0, entropy=1.0)
CALM = {
    "loss/grad_norm": 0.1,
    "loss/grad_norm_max": 0.2,
    "loss/entropy": 0.5,
    "loss/log_ratio_p99": 0.3,
    "loss/log_ratio_p01": -0.3,
    "rollout/valid_turn_rate": 0.95,
}


def observe(alarm: CollapseAlarm, steps: list[dict[str, Any]]) -> list[int]:
    return [step for step, changed in enumerate(steps, start=1) if alarm.observe(step, CALM | changed)]


def test_a_calm_run_raises_none() -> None:
    assert observe(CollapseAlarm(LIMITS), [{}] * 50) == []


@pytest.mark.parametrize(
    "signal",
    [
        {"loss/log_ratio_p99": 1.2},
        {"loss/log_ratio_p01": -1.2},
        {"rollout/valid_turn_rate": 0.8},
        {"loss/grad_norm_max": 2.5},
        {"loss/grad_norm_max": None},
        {"loss/entropy": 0.1},
        {"loss/entropy": 2.0},
    ],
)
def test_one_signal_alarms_once_it_lasts(signal: dict[str, Any]) -> None:
    start = [{}] * BASELINE
    assert observe(CollapseAlarm(LIMITS), [*start, signal, {}, {}]) == []
    assert observe(CollapseAlarm(LIMITS), [*start, signal, signal, signal]) == [BASELINE + 2]


def test_two_signals_at_once_alarm_at_once_and_say_why() -> None:
    alarm = CollapseAlarm(LIMITS)
    assert observe(alarm, [{}] * 4) == []
    found = alarm.observe(5, CALM | {"loss/log_ratio_p99": 1.25, "rollout/valid_turn_rate": 0.8})
    assert found is not None and (found.step, found.since) == (5, 5)
    assert "beyond 1.25" in found.reason and "0.150 below its best" in found.reason
    assert found.event("warn")["signals"] == {"ratio_tail": 1.25, "invalid_turns": 0.15}


def test_since_is_the_first_of_the_steps_in_a_row() -> None:
    alarm = CollapseAlarm(LIMITS)
    alarm.observe(1, CALM | {"loss/log_ratio_p99": 2.0})
    alarm.observe(2, CALM)
    alarm.observe(3, CALM | {"loss/log_ratio_p99": 2.0})
    found = alarm.observe(4, CALM | {"loss/log_ratio_p99": 2.0})
    assert found is not None and found.since == 3


def test_off_and_steps_without_an_update_are_silent() -> None:
    beyond = {"loss/log_ratio_p99": 9.0, "rollout/valid_turn_rate": 0.0}
    assert observe(CollapseAlarm(AlarmConfig(action="off")), [beyond] * 3) == []
    assert CollapseAlarm(LIMITS).observe(1, {"eval/success": 0.5}) is None


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    append_event(run_dir, {"step": 1, "kind": "collapse_alarm"})
    append_event(run_dir, {"step": 2, "kind": "roll_back"})
    assert [line["step"] for line in read_jsonl(run_dir.events)] == [1, 2]
    assert json.loads(run_dir.events.read_text().splitlines()[1])["kind"] == "roll_back"
