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
    "loss/approx_kl": 0.02,
    "rollout/valid_turn_rate": 0.95,
}


def observe(alarm: CollapseAlarm, steps: list[dict[str, Any]]) -> list[int]:
    return [step for step, changed in enumerate(steps, start=1) if alarm.observe(step, CALM | changed)]


def test_a_calm_run_raises_none() -> None:
    assert observe(CollapseAlarm(LIMITS), [{}] * 50) == []


@pytest.mark.parametrize(
    "signal",
    [
        {"loss/approx_kl": 0.6},
        {"loss/approx_kl": None},
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
    found = alarm.observe(5, CALM | {"loss/approx_kl": 0.78125, "rollout/valid_turn_rate": 0.8})
    assert found is not None and (found.step, found.since) == (5, 5)
    assert "square of 1.25" in found.reason and "0.150 below its best" in found.reason
    assert found.event("warn")["signals"] == {"ratio_tail": 1.25, "invalid_turns": 0.15}


def test_since_is_the_first_of_the_steps_in_a_row() -> None:
    alarm = CollapseAlarm(LIMITS)
    alarm.observe(1, CALM | {"loss/approx_kl": 2.0})
    alarm.observe(2, CALM)
    alarm.observe(3, CALM | {"loss/approx_kl": 2.0})
    found = alarm.observe(4, CALM | {"loss/approx_kl": 2.0})
    assert found is not None and found.since == 3


def test_the_baseline_is_made_of_steps_with_a_gradient() -> None:
    alarm = CollapseAlarm(LIMITS)
    silent = {"loss/grad_norm_max": 0.0}
    assert observe(alarm, [silent, silent, silent, {}, {}, {}, {}, {}]) == []


def test_off_and_steps_without_an_update_are_silent() -> None:
    beyond = {"loss/approx_kl": 9.0, "rollout/valid_turn_rate": 0.0}
    assert observe(CollapseAlarm(AlarmConfig(action="off")), [beyond] * 3) == []
    assert CollapseAlarm(LIMITS).observe(1, {"eval/success": 0.5}) is None


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    append_event(run_dir, {"step": 1, "kind": "collapse_alarm"})
    append_event(run_dir, {"step": 2, "kind": "roll_back"})
    assert [line["step"] for line in read_jsonl(run_dir.events)] == [1, 2]
    assert json.loads(run_dir.events.read_text().splitlines()[1])["kind"] == "roll_back"


# Recorded runs of configs/studies/alarm.yaml. The limits were set on seeds 0 and 1.
RECORDED = Path(__file__).resolve().parents[2] / "docs/stability/alarm_runs.jsonl"
HELD_OUT = (2, 3, 4)
LEAD = 5


def recorded() -> list[dict[str, Any]]:
    return [run for run in read_jsonl(RECORDED) if run["seed"] in HELD_OUT]


def lost_at(run: dict[str, Any]) -> int | None:
    """The first step from which on success stayed below half of its best so far."""
    best, lost = 0.0, None
    for line in run["steps"]:
        best = max(best, line["eval/success"])
        below = line["eval/success"] < best / 2
        lost = (lost or int(line["step"])) if below else None
    return lost


def raised_at(run: dict[str, Any]) -> int | None:
    alarm = CollapseAlarm(AlarmConfig())
    found = (alarm.observe(line["step"], line) for line in run["steps"])
    return next((one.step for one in found if one), None)


def test_collapses_are_seen_five_steps_ahead_on_runs_that_the_limits_were_not_set_on() -> None:
    leads = []
    for run in recorded():
        lost, raised = lost_at(run), raised_at(run)
        if lost is not None:
            leads.append(-1 if raised is None else lost - raised)
    assert len(leads) >= 8
    assert sum(lead >= LEAD for lead in leads) >= 0.8 * len(leads), leads


def test_healthy_runs_are_left_alone() -> None:
    healthy = [run for run in recorded() if lost_at(run) is None]
    assert len(healthy) >= 8
    assert sum(raised_at(run) is not None for run in healthy) <= 0.05 * len(healthy)
