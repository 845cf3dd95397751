"""A run that is killed at any moment and resumed equals the uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sorl_train.engine import LocalEngine
from sorl_train.run.checkpoint import list_checkpoints
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.recorder import Recorder

from .conftest import train_short
from .outcomes import SMALL, UNDERSCORED, Killed, outcome


def test_a_run_that_ends_in_its_first_steps_resumes_as_if_it_had_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the first checkpoint but that of step 0, and right after the row of a step: each row is there once."""
    settings: dict[str, Any] = {"update__steps": 2, "checkpoint__every": 2, "rollout__batch_size": 8}
    whole, _ = train_short(tmp_path / "whole", **settings)

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Recorder, "watch", killed)
        train_short(tmp_path / "killed", **settings)
    assert [line["step"] for line in read_jsonl(tmp_path / "killed" / "metrics.jsonl")] == [0, 1]
    resumed, _ = train_short(tmp_path / "killed", resume=True, **settings)
    assert outcome(resumed) == outcome(whole)


@pytest.mark.parametrize("step", [1, 3])
def test_a_signal_between_two_checkpoints_leaves_no_trace(
    step: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The checkpoint that it asks for takes no place among those of ``checkpoint.keep``."""
    settings = UNDERSCORED | {"checkpoint__every": 2, "checkpoint__keep": 2}
    whole, _ = train_short(tmp_path / "whole", **settings)
    update = LocalEngine.update

    def interrupted(self: LocalEngine, batch: Any, number: int) -> Any:
        if number == step:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, batch, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalEngine, "update", interrupted)
        train_short(tmp_path / "stopped", **settings)
    stopped = RunDir(tmp_path / "stopped")
    names = [path.name for path in list_checkpoints(stopped.checkpoints)]
    assert names == [f"step_{step - 1:06d}", f"step_{step:06d}"]
    resumed, _ = train_short(stopped.path, resume=True, **settings)
    assert outcome(resumed) == outcome(whole)


class ForkedRuns:
    """Runs of ``sorl-train`` as processes that start at once; see ``forked_runs``."""

    def __init__(self, log: Path) -> None:
        script = Path(__file__).with_name("forked_runs.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(
        self, folder: Path, *more: str, die_at: int = 0, meanwhile: Callable[[int], None] | None = None
    ) -> int:
        """Run to the end; its status. ``meanwhile`` gets the process id."""
        flags = [part for name, value in SMALL.items() for part in (f"--{name}", json.dumps(value))]
        arguments = ["--run_dir", str(folder), *more, *flags]
        order = {"arguments": arguments, "log": str(self.log), "die_at": die_at, "folder": str(folder)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        process_id = int(self._process.stdout.readline())
        if meanwhile is not None:
            meanwhile(process_id)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[ForkedRuns]:
    runs = ForkedRuns(tmp_path / "log")
    yield runs
    runs.close()


def kill_when_grown(file: Path, delay: float) -> Callable[[int], None]:
    """SIGKILL some seconds after the size of a file has changed."""

    def size() -> int:
        return file.stat().st_size if file.exists() else 0

    before = size()

    def kill(process_id: int) -> None:
        deadline = time.monotonic() + 60
        while size() == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        with suppress(ProcessLookupError):  # it has ended
            os.kill(process_id, signal.SIGKILL)

    return kill


def kill_at_random(
    forked: ForkedRuns, folder: Path, kills: int, changes: int, draw: random.Random
) -> dict[str, int]:
    """Start or resume the run in ``folder`` until ``kills`` kills have hit it, then let it end; returns statuses.

    Half of the moments lie just before one of the ``changes`` that a whole run makes to its files, the others a random
    while after the metrics have grown, so in sampling, updates and evaluation.
    """
    statuses: dict[str, int] = {}
    hit = 0
    while hit < kills:
        if (folder / "summary.json").exists():  # it came through to its end: another one from the beginning
            shutil.rmtree(folder)
        resumes = RunDir(folder).has_checkpoint
        words = ["--resume"] if resumes else ["--overwrite"]
        if draw.random() < 0.5:
            status = forked(folder, *words, die_at=draw.randrange(1, changes))
        else:
            kill = kill_when_grown(RunDir(folder).metrics, draw.uniform(0.0, 0.5))
            status = forked(folder, *words, meanwhile=kill)
        assert status in (0, -signal.SIGKILL), forked.log.read_text()[-3000:]
        hit += status == -signal.SIGKILL
        where = "resumed" if resumes else "from the beginning"
        statuses[where] = statuses.get(where, 0) + 1
    if not (folder / "summary.json").exists():
        status = forked(folder, "--resume" if RunDir(folder).has_checkpoint else "--overwrite")
        assert status == 0, forked.log.read_text()[-3000:]
    return statuses


@pytest.mark.slow
def test_thirty_kills_leave_no_trace(forked: ForkedRuns, tmp_path: Path) -> None:
    """SIGKILL at 30 random moments of 3 runs, at any change to their files and in between: after the last resume each
    equals the uninterrupted run to the byte."""
    whole = RunDir(tmp_path / "whole")
    assert forked(whole.path) == 0, forked.log.read_text()[-3000:]
    expected = outcome(whole)
    draw = random.Random(12)
    counts = {"resumed": 0, "from the beginning": 0}
    for number in range(3):
        run = RunDir(tmp_path / f"killed-{number}")
        for name, count in kill_at_random(forked, run.path, 10, changes=150, draw=draw).items():
            counts[name] += count
        assert outcome(run) == expected
        assert not [path for path in run.checkpoints.iterdir() if path.name.startswith((".", "damaged"))]
    assert min(counts.values()) >= 3, counts
