"""``sorl-lab stability`` as a command: its options, its folder, and what becomes of its runs when it is interrupted."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_train.lab import cli as lab
from sorl_train.lab.cli import main, run_all
from sorl_train.lab.study import StudyRun, load_study
from sorl_train.run.files import FolderLock

from ...waiting import wait_until

# In place of Python: a run that says so when it is asked to end, and ends when it is asked a second time.
STUBBORN = """#!/bin/bash
trap 'echo asked; asked=$((asked + 1)); [ $asked = 2 ] && exit 130' INT
echo started
while true; do sleep 0.02; done
"""


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyRun:
    """A run whose process is ``STUBBORN``."""
    program = tmp_path / "stubborn"
    program.write_text(STUBBORN)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return load_study("severe").runs[0]


def test_a_run_that_fails_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "mine.yaml"
    study.write_text("settings: {task: minhop}\n")
    assert main(["stability", "--config", str(study), "--out", str(tmp_path / "out")]) == 1
    out, error = capsys.readouterr()
    assert "1/1 FAILED" in error and out == "no run has finished yet\n"
    failed = (
        "\nsorl-lab: default, seed 0 failed (sorl-train: there is no task 'minhop'. Did you mean 'minihop'?"
    )
    assert failed in error and error.rstrip().endswith(".log), so it is not in the table")


def test_a_run_that_ends_with_status_0_and_no_summary_has_failed(
    run: StudyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(sys.executable).write_text("#!/bin/bash\nexit 0\n")
    assert run_all([run], tmp_path, 1) == [run]
    assert "1/1 FAILED" in capsys.readouterr().err


@pytest.fixture(name="ctrl_c")
def ctrl_c_fixture() -> Iterator[None]:
    """Ctrl-C as ``main`` has it: pytest's own may be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_for(log: Path, text: str) -> None:
    wait_until(lambda: log.is_file() and log.read_text() == text, log.read_text)


@pytest.mark.usefixtures("ctrl_c")
def test_each_ctrl_c_reaches_the_runs_and_none_is_left(run: StudyRun, tmp_path: Path) -> None:
    log = tmp_path / "logs" / f"{run.id}.log"

    def press() -> None:
        wait_for(log, "started\n")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(log, "started\nasked\n")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_all([run], tmp_path, 1)
    presser.join()
    assert log.read_text() == "started\nasked\nasked\n"
    assert run_all([], tmp_path, 1) == []  # the lock is free: no run is left


def test_a_folder_is_one_studys_at_a_time(run: StudyRun, tmp_path: Path) -> None:
    """Also while a run goes on whose sorl-lab was killed: two processes would write into one run folder."""
    for name in ("logs", "configs"):
        (tmp_path / name).mkdir()
    with FolderLock(tmp_path, "--out") as lock:
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}: .* give another --out"):
            run_all([], tmp_path, 1)
        process = lab._start(run, tmp_path, lock.descriptor)
    try:
        with pytest.raises(UserError, match=f"{tmp_path} is in use by"):
            run_all([], tmp_path, 1)
    finally:
        process.kill()
        process.wait()
    # a process that the run was about to start as it was killed may hold the lock for another moment
    assert wait_until(lambda: runs_nothing(tmp_path))


def runs_nothing(folder: Path) -> bool:
    try:
        return run_all([], folder, 1) == []
    except UserError:
        return False


def test_a_study_of_which_no_run_has_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that broke off is named: what diverges does not finish, and would be missing from the medians unseen."""
    (tmp_path / "runs" / load_study("severe").runs[1].id).mkdir(parents=True)
    assert main(["stability", "--config", "severe", "--out", str(tmp_path), "--table"]) == 0
    assert capsys.readouterr() == (
        "no run has finished yet\n",
        "sorl-lab: so_ppo, seed 0 has not finished, so it is not in the table\n",
    )
