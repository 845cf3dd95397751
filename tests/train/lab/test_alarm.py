"""``sorl-lab alarm``: judging by hand, records, the command; and the alarm on the runs of docs/stability.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_train.config.run_settings import AlarmConfig
from sorl_train.lab.alarm import Figures, Recorded, count, judge, read_runs, table
from sorl_train.lab.cli import main
from sorl_train.run.folder import RunDir

CALM = {
    "loss/grad_norm": 0.1,
    "loss/grad_norm_max": 0.2,
    "loss/entropy": 0.5,
    "rollout/valid_turn_rate": 0.95,
}


def run(success: tuple[float, ...], mean_update_distance: float = 0.01, **first: Any) -> Recorded:
    """A run with an evaluation after each step; ``first`` is what its first step has instead."""
    every = CALM | {"loss/approx_kl": mean_update_distance**2 / 2}
    lines = [every | {"step": step, "eval/success": value} for step, value in enumerate(success, start=1)]
    return Recorded("a study", "an arm", 3, [lines[0] | first, *lines[1:]])


def test_half_the_peak_is_lost_when_success_stays_below_it() -> None:
    """Half of .8 is lost in step 3 for good, in step 2 only for a while; .2 alarms at once."""
    lost = judge(run((0.8, 0.7, 0.3, 0.2), mean_update_distance=0.2), AlarmConfig())
    back = judge(run((0.8, 0.3, 0.5, 0.6)), AlarmConfig())
    assert (lost.lost, lost.alarm and lost.alarm.step, lost.lead) == (3, 1, 2)
    assert (back.lost, back.alarm, back.lead) == (None, None, None)
    # five steps ahead of step 3 there is none
    assert (lost.mean_update_distance, back.mean_update_distance) == (None, pytest.approx(0.01))
    assert count([lost, back]) == Figures(collapsed=1, ahead=0, healthy=1, alarmed=0)


def test_an_evaluation_without_a_figure_says_nothing() -> None:
    silent = run((0.8, 0.7, 0.6))
    silent = Recorded("a study", "an arm", 3, [*silent.lines, CALM | {"step": 4, "eval/success": None}])
    assert judge(silent, AlarmConfig()).lost is None
    assert "| 0.800 | 0.600 |" in table([silent], [judge(silent, AlarmConfig())])


def test_strain_is_that_of_the_steps_with_time_left() -> None:
    """Half is lost in step 7: what counts is what was seen up to step 2."""
    early = run((0.8,) * 6 + (0.1,), **{"loss/approx_kl": 0.1**2 / 2})
    assert judge(early, AlarmConfig()).mean_update_distance == pytest.approx(0.1)
    assert count([judge(early, AlarmConfig())]) == Figures(collapsed=1, ahead=1, healthy=0, alarmed=0)
    assert count([judge(early, AlarmConfig(mean_update_distance=0.2))]) == Figures(1, 0, 0, 0)


def run_folder(folder: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    run_dir = RunDir(folder)
    folder.mkdir()
    run_dir.config.write_text("algo: so_ppo\nseed: 4\n")
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_recorded_runs_are_read(tmp_path: Path) -> None:
    """A figure that was not finite stays one, and what a step does not have stays away."""
    columns = {"step": [0, 1], "eval/success": [0.5, None], "loss/approx_kl": [None, "not finite"]}
    record = {"study": "a study", "cell": "an arm", "seed": 3, **columns}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    lines = [{"step": 0, "eval/success": 0.5}, {"step": 1, "loss/approx_kl": None}]
    assert read_runs([tmp_path / "records.jsonl"]) == [Recorded("a study", "an arm", 3, lines)]


def test_the_command_on_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "mine", run((0.8,) * 6 + (0.1,), mean_update_distance=0.08).lines)
    assert main(["alarm", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "| mine | 4 | 7 | 0.800 | 0.100 | 7 | 1 | 6 | 0.080 | mean_update_distance |" in out
    assert "1 collapsed" in out and "1 of them with an alarm 5 or more steps before" in out
    assert main(["alarm", str(folder), "--alarm.mean_update_distance", "0.1"]) == 0
    assert "| 7 | | | 0.080 | |" in capsys.readouterr().out


# Recorded runs.
STABILITY = Path(__file__).resolve().parents[3] / "docs/stability"


def figures(name: str, *, quickstarts: bool = False, rising: bool | None = None) -> Figures:
    """Of a file's runs: the quickstarts or the others; those at rising rates, at constant ones, or both."""
    runs = [
        run
        for run in read_runs([STABILITY / f"{name}.jsonl"])
        if (run.study == "quickstart") is quickstarts and rising in (None, run.study == "alarm")
    ]
    return count([judge(run, AlarmConfig()) for run in runs])


@pytest.mark.parametrize(
    ("name", "which", "found"),
    [
        # rising rates, and whole quickstarts: what the limits were set on
        ("alarm_runs", {}, Figures(collapsed=20, ahead=19, healthy=18, alarmed=0)),
        ("alarm_other_runs", {"quickstarts": True}, Figures(0, 0, 15, 0)),
        # constant rates, many far too high: what has five steps gets five, and so do runs that come through
        ("alarm_other_runs", {}, Figures(54, 16, 68, 53)),
        # looked at only after the rule and its limits had been committed
        ("alarm_held_out", {"rising": True}, Figures(13, 13, 19, 0)),
        ("alarm_held_out", {"rising": False}, Figures(71, 31, 152, 126)),
    ],
)
def test_the_alarm_on_recorded_runs(name: str, which: dict[str, bool], found: Figures) -> None:
    assert figures(name, **which) == found
