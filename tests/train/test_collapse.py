"""What a run does about a collapse: patience, and the alarm's warning, stop and roll-back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_train.engine import LocalEngine
from sorl_train.run.alarm import Alarm, CollapseAlarm
from sorl_train.run.checkpoint import list_checkpoints
from sorl_train.run.files import read_jsonl as read_metrics
from sorl_train.run.folder import RunDir

from .conftest import train_short


def test_patience_ends_a_collapsed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    curve = iter([0.8, 0.3, 0.5, 0.39, 0.3, 0.9])
    monkeypatch.setattr(LocalEngine, "evaluate", lambda *_, **__: {"eval/success": next(curve)})
    run_dir, summary = train_short(tmp_path / "run", update__steps=9, eval__every=1, eval__patience=2)
    assert summary["steps"] == 4 and summary["final_success"] == 0.3 and summary["best_success"] == 0.8
    assert (run_dir.checkpoints / "step_000004").is_dir()


# so low that the first step is beyond it
NERVOUS = {
    "alarm__ratio_tail": 1e-9,
    "update__epochs": 2,
    "update__mini_batch_size": 8,
    "checkpoint__every": 1,
}


def test_the_alarm_warns_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir, summary = train_short(tmp_path / "run", update__steps=4, **NERVOUS)
    (event,) = read_metrics(run_dir.events)
    assert event["step"] == 1 and event["kind"] == "collapse_alarm" and event["action"] == "warn"
    assert "log-ratio" in event["reason"] and summary["steps"] == 4


def test_the_alarm_stops_a_run_which_can_be_resumed(tmp_path: Path) -> None:
    run_dir, summary = train_short(tmp_path / "run", update__steps=4, **NERVOUS, alarm__action="stop")
    assert summary["steps"] == 1 and (run_dir.checkpoints / "step_000001").is_dir()


def test_the_alarm_rolls_a_run_back_to_a_lower_rate(tmp_path: Path) -> None:
    """Each of the lower rates alarms again: 4 steps take as many roll-backs as it takes to come below the limit."""
    constant = {"optim__lr": 1e-3, "optim__warmup_ratio": 0.0, "optim__schedule": "constant"}
    settings = NERVOUS | constant | {"alarm__ratio_tail": 0.02}
    run_dir, summary = train_short(
        tmp_path / "run", update__steps=4, **settings, alarm__action="roll_back", alarm__roll_back_lr=0.1
    )
    events = read_metrics(run_dir.events)
    assert [event["kind"] for event in events[:2]] == ["collapse_alarm", "roll_back"]
    alarm, back = events[:2]
    assert back["step"] < alarm["since"] <= alarm["step"] and back["lr_scale"] == 0.1
    lines = read_metrics(run_dir.metrics)
    assert summary["steps"] == 4 and [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[-1]["loss/lr"] == pytest.approx(1e-3 * events[-1]["lr_scale"])
    kept = read_metrics(run_dir.path / "rolled_back_1.jsonl")
    assert kept[-1]["step"] == alarm["step"] and kept[-1]["loss/lr"] == pytest.approx(1e-3)
    state = json.loads((run_dir.checkpoints / "step_000004" / "state.json").read_text())
    assert state["lr_scale"] == events[-1]["lr_scale"]


def test_a_run_that_was_rolled_back_resumes_from_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An alarm in step 4 over steps 2 to 4, ended right after its roll-back: of checkpoints 0 to 3, those of 2 and 3
    are gone, and the resumed run goes on from step 1 at half the rate. Patience, out in the same step, begins anew."""
    settings: dict[str, Any] = {
        "update__steps": 6,
        "checkpoint__every": 1,
        "checkpoint__keep": 9,
        "eval__every": 1,
    }
    settings |= {"alarm__action": "roll_back", "optim__warmup_ratio": 0.0, "optim__schedule": "constant"}
    settings |= {"eval__patience": 2}
    curve = iter([0.8, 0.8, 0.8, 0.1, 0.1])

    def observe(self: CollapseAlarm, step: int, metrics: Any) -> Alarm | None:
        return Alarm(4, 2, "as the test says", {}) if step == 4 else None

    original = LocalEngine.collect

    def collect(self: LocalEngine, step: int) -> Any:
        if self.lr_scale < 1.0:
            raise KeyboardInterrupt
        return original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(CollapseAlarm, "observe", observe)
        patch.setattr(LocalEngine, "evaluate", lambda *_, **__: {"eval/success": next(curve)})
        patch.setattr(LocalEngine, "collect", collect)
        with pytest.raises(KeyboardInterrupt):
            train_short(tmp_path / "run", **settings)
    run_dir = RunDir(tmp_path / "run")
    names = [path.name for path in list_checkpoints(run_dir.checkpoints)]
    assert names == ["step_000000", "step_000001"]
    _, summary = train_short(run_dir.path, resume=True, **settings | {"eval__patience": 0})
    lines = read_metrics(run_dir.metrics)
    assert summary["steps"] == 6 and [line["step"] for line in lines] == list(range(7))
    assert [line["loss/lr"] / lines[1]["loss/lr"] for line in lines[1:]] == pytest.approx([1.0] + [0.5] * 5)
    assert [event["kind"] for event in read_metrics(run_dir.events)][:2] == ["collapse_alarm", "roll_back"]
