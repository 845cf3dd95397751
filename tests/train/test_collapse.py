"""What a run does when its alarm stops it. Warnings and ``eval.patience``: run/test_recorder.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from sorl_train.cli import main
from sorl_train.run.files import read_jsonl as read_metrics
from sorl_train.run.folder import RunDir
from sorl_train.run.recorder import Recorder
from sorl_train.run.stability import next_moves
from sorl_train.train_rl import run

from .conftest import QuietDisplay, short_config, train_short
from .outcomes import Killed, outcome

# so low that the first step is beyond it
NERVOUS = {
    "alarm__ratio_tail": 1e-9,
    "update__epochs": 2,
    "update__mini_batch_size": 8,
    "checkpoint__every": 1,
}


def stopped_by_the_alarm(folder: Path) -> tuple[RunDir, str]:
    """A run that its alarm ends after the first of four steps, and its last message."""
    config = short_config(update__steps=4, alarm__action="stop", **NERVOUS)
    run_dir, display = RunDir.create(folder, config), QuietDisplay()
    assert run(config, run_dir, display, resume=False)["steps"] == 1
    return run_dir, display.messages[-1]


def test_the_alarm_stops_a_run_and_gives_the_command_that_goes_on(tmp_path: Path) -> None:
    run_dir, message = stopped_by_the_alarm(tmp_path / "a run")
    assert (run_dir.checkpoints / "step_000001").is_dir()
    alarm, ended = read_metrics(run_dir.events)[-2:]
    assert (alarm["step"], alarm["kind"], alarm["action"]) == (1, "collapse_alarm", "stop")
    assert "log-ratio" in alarm["reason"] and ended["kind"] == "ended"
    why, command = message.split("\n")
    assert why.startswith("ended by the collapse alarm after step 1 (alarm.action=stop). ")
    for text in (why, command):
        assert "--update.trust_kl 0.01" in text
    name, *words = shlex.split(command)
    assert name == "sorl-train" and main([*words, "--update.steps", "1", "--alarm.action", "warn"]) == 0
    further = tmp_path / "a run-2"
    first, best = (read_metrics(path / "metrics.jsonl") for path in (further, run_dir.path))
    assert first[0]["eval/success"] == max(line["eval/success"] for line in best if "eval/success" in line)
    assert first[-1]["step"] == 1
    assert "--optim.lr 0.0005" in next_moves(0.001, 0.01, run_dir, 1)


def test_a_run_that_is_killed_between_its_last_checkpoint_and_its_summary_ends_when_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would train on otherwise; so it does with more steps."""

    def killed(*_: Any) -> None:
        raise Killed

    whole, _ = stopped_by_the_alarm(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Recorder, "finish", killed)
        stopped_by_the_alarm(tmp_path / "killed")
    settings = NERVOUS | {"alarm__action": "stop"}
    resumed, summary = train_short(tmp_path / "killed", resume=True, update__steps=4, **settings)
    assert summary["steps"] == 1 and outcome(resumed) == outcome(whole)
    _, summary = train_short(tmp_path / "killed", resume=True, update__steps=3, **settings)
    assert summary["steps"] == 3
