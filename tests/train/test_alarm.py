"""The collapse alarm: signals by hand, recorded runs, and what a run does about it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sorl_train.alarm import BASELINE, MEMORY, SPIKE, CollapseAlarm, alarm_so_far, append_event
from sorl_train.config import AlarmConfig
from sorl_train.metrics_log import read_jsonl
from sorl_train.run_dir import RunDir

LIMITS = AlarmConfig(strain=9.0, ratio_tail=1.0, invalid_turns=0.1, grad_norm=10.0, entropy=1.0)
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


def far(*ratio_tails: float) -> list[dict[str, Any]]:
    """Steps with these root mean squares of the log-ratios."""
    return [{"loss/approx_kl": value**2 / 2.0} for value in ratio_tails]


def test_strain_is_a_mean_in_which_older_steps_count_for_less() -> None:
    older = math.exp(-1.0 / MEMORY)
    mean = (older * 0.1 + 0.2) / (older + 1.0)
    for limit, raised in ((mean - 1e-6, [2]), (mean + 1e-6, [])):
        assert observe(CollapseAlarm(AlarmConfig(strain=limit)), far(0.1, 0.2)) == raised


def test_lone_steps_are_no_strain_and_many_small_ones_are() -> None:
    """A step counts as at most SPIKE: (9 * .03 + .3) / 10 < .07. One of .08 after the other comes above it."""
    assert SPIKE == 0.3
    limits = AlarmConfig(strain=0.07, ratio_tail=9.0)
    assert observe(CollapseAlarm(limits), far(*[0.03] * 9, 5.0, *[0.03] * 20)) == []
    (step,) = observe(CollapseAlarm(limits), far(*[0.03] * 9, *[0.08] * 50))
    assert 30 < step < 50  # without forgetting, 9 * .03 + n * .08 = (9 + n) * .07 has n = 36


def test_a_figure_that_is_not_finite_alarms_at_once() -> None:
    assert observe(CollapseAlarm(LIMITS), [{}, {"loss/grad_norm_max": 0.2, "loss/approx_kl": None}]) == [2]


def test_an_alarm_says_why_and_since_when() -> None:
    alarm = CollapseAlarm(LIMITS)
    assert observe(alarm, [{}] * 4) == []
    beyond = CALM | {"loss/approx_kl": 2.0, "rollout/valid_turn_rate": 0.95 - 0.24}
    found = alarm.observe(5, beyond)  # root mean squares .2, .2, 2; shares .24, 0, 0
    assert found is None
    found = alarm.observe(6, beyond)
    assert found is not None and (found.step, found.since) == (6, 4)
    assert "square of 1.40" in found.reason and "0.160 below its best" in found.reason
    assert found.event("warn")["signals"] == {
        "ratio_tail": pytest.approx(1.4),
        "invalid_turns": pytest.approx(0.16),
    }


def test_the_baseline_is_made_of_steps_with_a_gradient() -> None:
    alarm = CollapseAlarm(LIMITS)
    silent = {"loss/grad_norm_max": 0.0}
    assert observe(alarm, [silent, silent, silent, {}, {}, {}, {}, {}]) == []


def test_off_and_steps_without_an_update_are_silent() -> None:
    beyond = {"loss/approx_kl": 9.0, "rollout/valid_turn_rate": 0.0}
    assert observe(CollapseAlarm(AlarmConfig(action="off")), [beyond] * 3) == []
    assert CollapseAlarm(LIMITS).observe(1, {"eval/success": 0.5}) is None


def test_a_resumed_run_goes_on_with_the_strain_so_far(tmp_path: Path) -> None:
    limits, run_dir = AlarmConfig(strain=0.11), RunDir(tmp_path)
    steps = [
        {"step": step} | CALM | line for step, line in enumerate(far(0.05, 0.05, 0.2, 0.2, 0.2), start=1)
    ]
    whole = CollapseAlarm(limits)
    raised = [whole.observe(line["step"], line) for line in steps]
    assert [alarm.step for alarm in raised if alarm] == [4]  # the means: .05, .05, just over .1, about .126
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    resumed = alarm_so_far(limits, run_dir, 3)
    assert resumed.observe(4, steps[3]) == raised[3]
    assert alarm_so_far(limits, run_dir, 4).observe(5, steps[4]) is None  # it was raised before


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    append_event(run_dir, {"step": 1, "kind": "collapse_alarm"})
    append_event(run_dir, {"step": 2, "kind": "roll_back"})
    assert [line["step"] for line in read_jsonl(run_dir.events)] == [1, 2]
    assert json.loads(run_dir.events.read_text().splitlines()[1])["kind"] == "roll_back"


# Recorded runs: what the alarm looks at, step by step, and the success that an evaluation after the step found.
STABILITY = Path(__file__).resolve().parents[2] / "docs/stability"
EARLIER_STUDIES = ("severe", "grid", "x_choices", "x_controls", "norms", "norms2", "trial")
AHEAD = 5  # steps between the alarm and the loss of half the peak that the bar asks for


def recorded(name: str, study: str | None = None) -> list[list[dict[str, Any]]]:
    """The runs of a file, each the list of its steps; those of one study, if named."""
    found = []
    for run in read_jsonl(STABILITY / name):
        if study is None or run["study"] == study:
            columns = {key: run[key] for key in run if key not in ("study", "cell", "seed")}
            lines = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            found.append([{key: value for key, value in line.items() if value is not None} for line in lines])
    return found


def lost_at(run: list[dict[str, Any]]) -> int | None:
    """The first step from which on success stayed below half of its best so far."""
    best, lost = 0.0, None
    for line in run:
        if "eval/success" in line:
            best = max(best, line["eval/success"])
            below = line["eval/success"] < best / 2
            lost = (lost or int(line["step"])) if below else None
    return lost


def raised_at(run: list[dict[str, Any]]) -> int | None:
    alarm = CollapseAlarm(AlarmConfig())
    found = (alarm.observe(line["step"], line) for line in run)
    return next((one.step for one in found if one), None)


@dataclass(frozen=True)
class Figures:
    """Of some runs: how many collapsed, and were alarmed how long before; how many did not, and were alarmed."""

    collapsed: int
    five_ahead: int
    before: int
    in_time: int  # no later than the step that lost half the peak
    possible: int  # those with an alarm five steps ahead of which there was a step to raise it in
    healthy: int
    alarmed: int

    @property
    def meets_the_bar(self) -> bool:
        return self.five_ahead >= 0.8 * self.collapsed and self.alarmed <= 0.05 * self.healthy


def figures(runs: list[list[dict[str, Any]]]) -> Figures:
    ends = [(lost_at(run), raised_at(run)) for run in runs]
    leads = [-1 if raised is None else lost - raised for lost, raised in ends if lost is not None]
    healthy = [raised is not None for lost, raised in ends if lost is None]
    return Figures(
        collapsed=len(leads),
        five_ahead=sum(lead >= AHEAD for lead in leads),
        before=sum(lead >= 1 for lead in leads),
        in_time=sum(lead >= 0 for lead in leads),
        possible=sum(lost is not None and lost > AHEAD for lost, _ in ends),
        healthy=len(healthy),
        alarmed=sum(healthy),
    )


def test_figures_by_hand() -> None:
    """Half of .8 is lost in step 3 for good, in step 2 only for a while; the first alarms at once."""
    lost = [{"step": n, "eval/success": s} for n, s in enumerate((0.8, 0.7, 0.3, 0.2), start=1)]
    back = [{"step": n, "eval/success": s} for n, s in enumerate((0.8, 0.3, 0.5, 0.6), start=1)]
    assert (lost_at(lost), lost_at(back)) == (3, None)
    far_at_once = [CALM | far(0.2)[0] | line for line in lost]
    calm = [CALM | far(0.01)[0] | line for line in back]
    assert figures([far_at_once, calm]) == Figures(1, 0, 1, 1, 0, 1, 0)


def test_runs_that_the_limits_were_set_on() -> None:
    """Rising rates, and whole quickstarts: not what the alarm is judged on."""
    runs = [run["steps"] for run in read_jsonl(STABILITY / "alarm_runs.jsonl")]
    assert figures(runs) == Figures(20, 19, 20, 20, possible=20, healthy=18, alarmed=0)
    assert figures(recorded("alarm_other_runs.jsonl", "quickstart")) == Figures(0, 0, 0, 0, 0, 15, 0)


def test_the_alarm_sees_strain_and_not_the_outcome() -> None:
    """At constant rates, many far too high: what has five steps gets five, and so do runs that come through."""
    runs = [run for study in EARLIER_STUDIES for run in recorded("alarm_other_runs.jsonl", study)]
    assert figures(runs) == Figures(54, 16, 39, 54, possible=16, healthy=68, alarmed=53)


# Runs looked at only after the rule and its limits had been committed.
def test_held_out_runs_at_rising_rates() -> None:
    found = figures(recorded("alarm_held_out.jsonl", "alarm"))
    assert found == Figures(4, 4, 4, 4, possible=4, healthy=19, alarmed=0)
    assert found.meets_the_bar


def test_held_out_collapses_are_seen_five_steps_ahead() -> None:
    found = figures(recorded("alarm_held_out.jsonl"))
    assert (found.collapsed, found.five_ahead) == (10, 10)


@pytest.mark.xfail(
    strict=True, reason="all 10 collapses are seen, but 29 of 48 healthy runs alarm, see docs/stability.md"
)
def test_held_out_runs_in_all_settings() -> None:
    assert figures(recorded("alarm_held_out.jsonl")).meets_the_bar
