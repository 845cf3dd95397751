"""A run that is killed, stopped by a signal or out of disk space at any moment equals, resumed, the uninterrupted run.

``faults.c`` brings about what happens, at a change that a run or any library in it makes to a file of the run's folder,
or after some time of computing. ``SORL_ALL_KILLS=1`` runs all 200 events, which takes minutes, else a part of them.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest

from sorl_train.engine import LocalEngine
from sorl_train.report.report import main as sorl_report
from sorl_train.run.checkpoint import find_damage, list_checkpoints
from sorl_train.run.folder import RunDir

from .conftest import WORLD, flags, train_short
from .outcomes import SMALL, UNDERSCORED, outcome


def test_a_signal_between_two_checkpoints_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The checkpoint that it asks for takes no place among those of ``checkpoint.keep``."""
    settings = UNDERSCORED | {"checkpoint__every": 2, "checkpoint__keep": 2}
    whole, _ = train_short(tmp_path / "whole", **settings)
    update = LocalEngine.update

    def interrupted(self: LocalEngine, batch: Any, number: int) -> Any:
        if number == 3:
            os.kill(os.getpid(), SIGINT)
        return update(self, batch, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalEngine, "update", interrupted)
        train_short(tmp_path / "stopped", **settings)
    stopped = RunDir(tmp_path / "stopped")
    names = [path.name for path in list_checkpoints(stopped.checkpoints)]
    assert names == ["step_000002", "step_000003"]
    resumed, _ = train_short(stopped.path, resume=True, **settings)
    assert outcome(resumed) == outcome(whole)


# Together they have all that a checkpoint can hold. In the second one a later policy is the best.
RUNS: dict[str, dict[str, Any]] = {
    "stale batches, trust region": SMALL,
    "best policies, one checkpoint kept": {
        "task_args": WORLD | {"train_questions": 8},
        "sft.steps": 60,
        "seed": 2,
        "rollout.batch_size": 8,
        "rollout.max_staleness": 0,
        "rollout.save_every": 1,
        "update.trust_kl": None,
        "optim.lr": 3e-3,
        "optim.warmup_ratio": 0.0,
        "eval.split": "train",
        "eval.temperature": 1.0,
        "eval.every": 1,
        "eval.num_examples": 8,
        "eval.num_examples_final": 8,
        "checkpoint.keep": 1,
    },
    "stale batches, replay": {
        "algo": "so_grpo",
        "task_args": WORLD | {"train_questions": 4},
        "sft.steps": 60,
        "seed": 2,
        "rollout.group_size": 2,
        "rollout.batch_size": 8,
        "update.mini_batch_size": 8,
        "replay.size": 12,
        "replay.mode": "recent",
        "update.trust_kl": None,
    },
    "saved every other step": {
        "rollout.max_staleness": 0,
        "update.steps": 5,
        "checkpoint.every": 2,
        "checkpoint.keep": 2,
    },
}


@dataclass(frozen=True)
class Kind:
    """Something that happens to runs.

    Attributes:
        times: how often, in all runs together.
        signals: what the process gets, one after the other.
        computing: after some time of computing, not at a change to a file.
        error: with which changes are refused; ``once``: only one of them, else all from then on.
    """

    times: int
    signals: Sequence[int] = ()
    computing: bool = False
    error: int = 0
    once: bool = False


KINDS = {
    "killed at a change": Kind(87, [SIGKILL]),
    "killed while computing": Kind(20, [SIGKILL], computing=True),
    "Ctrl-C at a change": Kind(10, [SIGINT]),
    "Ctrl-C while computing": Kind(6, [SIGINT], computing=True),
    "SIGTERM at a change": Kind(10, [SIGTERM]),
    "SIGTERM while computing": Kind(6, [SIGTERM], computing=True),
    "Ctrl-C twice": Kind(6, [SIGINT, SIGINT]),
    "Ctrl-C, then a kill": Kind(6, [SIGINT, SIGKILL]),
    "disk full": Kind(29, error=errno.ENOSPC),
    "disk full for a moment": Kind(20, error=errno.ENOSPC, once=True),
}
SHORT = 4  # every fourth event happens where not all are asked for


@dataclass(frozen=True)
class Ended:
    """How a process has ended: its status, its CPU time, what it printed, and the changes to files that it made."""

    status: int
    seconds: float
    printed: str
    changes: list[str]


class ForkedRuns:
    """Runs of ``sorl-train`` as processes that start at once; see ``forked_runs``."""

    def __init__(self, folder: Path, library: Path) -> None:
        script = Path(__file__).with_name("forked_runs.py")
        more = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "LD_PRELOAD": str(library)}
        self.log, self._changes = folder / "log", folder / "changes"
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | more,
        )

    def __call__(
        self,
        folder: Path,
        settings: dict[str, Any],
        words: Sequence[str] = (),
        faults: Sequence[Sequence[int]] = (),
        timers: Sequence[Sequence[int]] = (),
    ) -> Ended:
        """Run to the end."""
        order = {
            "arguments": [*words, "--run_dir", str(folder), *flags(settings)],
            "folder": str(folder),
            "log": str(self.log),
            "changes": str(self._changes),
            "faults": faults,
            "timers": timers,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        status, seconds = json.loads(self._process.stdout.readline())
        return Ended(status, seconds, self.log.read_text(), self._changes.read_text().splitlines())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedRuns]:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing, which compiles faults.c")
    folder = tmp_path_factory.mktemp("forked")
    source, library = Path(__file__).with_name("faults.c"), folder / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=120)
    runs = ForkedRuns(folder, library)
    yield runs
    runs.close()


class Trials:
    """One run after the other in one folder, each compared with the run that nothing happens to."""

    def __init__(self, forked: ForkedRuns, folder: Path, settings: dict[str, Any], seed: int) -> None:
        self.forked, self.settings = forked, SMALL | settings
        self.run = RunDir(folder / "run")
        self.draw = random.Random(seed)
        whole = RunDir(folder / "whole")
        self.whole = forked(whole.path, self.settings)
        assert self.whole.status == 0, self.whole.printed
        self.expected = outcome(whole)
        touched = {Path(line.split(" ")[1]).name for line in self.whole.changes}
        files = {path.name for path in whole.path.rglob("*") if path.is_file()}
        assert files <= touched, "faults.c does not see how these files are made"

    def let(self, kind: Kind) -> Ended:
        """Start or resume runs until this has happened to one."""
        for _ in range(50):
            ended = self._go_on(**self._moments(kind))
            self._check(ended, kind)
            if any(line.endswith("!") for line in ended.changes) or (kind.computing and ended.status):
                return ended
        raise AssertionError(f"this did not happen: {kind}")

    def finish(self) -> None:
        """Let the newest run come to its end."""
        while self.run.path.exists():
            self._check(self._go_on(), Kind(0))

    def _moments(self, kind: Kind) -> dict[str, Any]:
        draw, changes = self.draw, len(self.whole.changes)
        if kind.computing:
            seconds = draw.uniform(0.0, 0.8) * self.whole.seconds
            return {"timers": [(signal, int(1e6 * seconds)) for signal in kind.signals]}
        # half of them while a run starts or resumes
        moment = draw.randrange(1, draw.choice([50, changes // 2]))
        percent = draw.choice([0, draw.randrange(100)])
        if kind.error:
            return {"faults": [(moment, 0, kind.error, int(kind.once), percent)]}
        faults = []
        for signal in kind.signals:
            faults.append((moment, signal, 0, 0, percent))
            moment += draw.randrange(1, 60)
        return {"faults": faults}

    def _go_on(self, **faults: Any) -> Ended:
        word = "--resume" if self.run.has_checkpoint else "--overwrite"
        ended = self.forked(self.run.path, self.settings, [word], **faults)
        best = self.run.checkpoints / "best"
        for folder in [*list_checkpoints(self.run.checkpoints), *([best] if best.exists() else [])]:
            assert not find_damage(folder)
        return ended

    def _check(self, ended: Ended, kind: Kind) -> None:
        """How the process ended, and, if the run is finished, what it leaves."""
        statuses = {SIGKILL: [-SIGKILL], SIGINT: [130], SIGTERM: [130, -SIGTERM]}
        allowed = [0, *(status for signal in kind.signals for status in statuses[signal])]
        assert ended.status in ([0, 1, 2] if kind.error else allowed), ended.printed
        assert "Traceback" not in ended.printed and "fault of sorl" not in ended.printed, ended.printed
        if kind.error and ended.status:
            message = rf"^sorl-train: {self.run.path}\S*: no space left on device: free some space"
            assert re.search(message, ended.printed, re.MULTILINE), ended.printed
        if not self.run.summary.exists():
            assert ended.status
            return
        if ended.status:  # after the end of the training
            assert f"sorl-report {self.run.path}" in ended.printed or ended.status < 0, ended.printed
            assert sorl_report([str(self.run.path)]) == 0
            for left in self.run.path.glob(".*"):  # the lock of a process that was killed, and half a report
                left.unlink()
        assert outcome(self.run) == self.expected, ended.printed
        shutil.rmtree(self.run.path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)), ids=RUNS)
def test_what_happens_to_a_run_leaves_no_trace(number: int, forked: ForkedRuns, tmp_path: Path) -> None:
    names = [name for name, kind in KINDS.items() for _ in range(kind.times)]
    random.Random(0).shuffle(names)
    mine = names[number :: len(RUNS)]
    if not os.environ.get("SORL_ALL_KILLS"):
        mine = mine[: len(mine) // SHORT]
    trials = Trials(forked, tmp_path, list(RUNS.values())[number], seed=number)
    for name in mine:
        ended = trials.let(KINDS[name])
        first = next((line for line in ended.changes if line.endswith("!")), "")
        print(f"{name}: {first}, status {ended.status}")
    trials.finish()
