"""A run that was killed or whose files were damaged, then resumed: it equals the uninterrupted run, or is refused."""

from __future__ import annotations

import json
import os
import random
import re
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

from sorl_env.errors import UserError
from sorl_train.checkpoint import list_checkpoints
from sorl_train.cold_start import resolve_model
from sorl_train.engines.local import trainer
from sorl_train.engines.local.engine import LocalEngine
from sorl_train.evaluate.policy import find_policy
from sorl_train.hashed_folder import HASHES, find_damage, hash_file
from sorl_train.metrics_log import read_jsonl
from sorl_train.run_dir import RunDir

from ..damage import append, delete, empty, flip_a_bit, truncate
from .conftest import SHORT, QuietDisplay, short_config, train_short

# Everything that a checkpoint can hold: a critic, trajectories that wait, a best policy. Else as little as possible.
SMALL: dict[str, Any] = SHORT | {
    "update.steps": 4,
    "checkpoint.every": 1,
    "checkpoint.keep": 3,
    "eval.every": 2,
    "eval.num_examples": 4,
    "eval.num_examples_final": 4,
    "rollout.max_staleness": 1,
    "rollout.batch_size": 4,
    "rollout.save_every": 2,
    "update.mini_batch_size": 4,
}
UNDERSCORED = {name.replace(".", "__"): value for name, value in SMALL.items()}


class Killed(BaseException):
    """In place of a SIGKILL, where the test goes on in the same process."""


def outcome(run: RunDir) -> dict[str, Any]:
    """What the same run always leaves: its metrics, events and cards to the byte, its weights, the names of its files,
    its summary but for the clock."""
    final, best = list_checkpoints(run.checkpoints)[-1], run.checkpoints / "best"
    summary = json.loads(run.summary.read_text())
    files = {path.relative_to(run.path) for path in run.trajectories.iterdir()}
    return {
        "metrics": run.metrics.read_bytes(),
        "events": run.events.read_bytes() if run.events.exists() else b"",
        "timed steps": [line["step"] for line in read_jsonl(run.timings)],
        "weights": [hash_file(folder / "policy" / "model.safetensors") for folder in (final, best)],
        "trajectory files": sorted(map(str, files)),
        "trajectory card": re.sub("Code at commit .*", "", (run.trajectories / "README.md").read_text()),
        "summary": {name: value for name, value in summary.items() if name not in ("wall_s", "peak_rss_mb")},
    }


# -- kills ------------------------------------------------------------------------------------------------------
def test_a_run_that_ends_in_its_first_steps_resumes_as_if_it_had_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the first checkpoint but that of step 0, and right after the row of a step: each row is there once."""
    settings: dict[str, Any] = {"update__steps": 2, "checkpoint__every": 2, "rollout__batch_size": 8}
    whole, _ = train_short(tmp_path / "whole", **settings)

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainer, "watch", killed)
        train_short(tmp_path / "killed", **settings)
    assert [line["step"] for line in read_jsonl(tmp_path / "killed" / "metrics.jsonl")] == [0, 1]
    resumed, _ = train_short(tmp_path / "killed", resume=True, **settings)
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


# -- damages ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uninterrupted run leaves."""
    return outcome(train_short(tmp_path_factory.mktemp("whole") / "run", **UNDERSCORED)[0])


def stop_in_step(folder: Path, step: int, **settings: Any) -> RunDir:
    """A run that ends when it is about to save the trajectories of a step."""
    save = LocalEngine.save_trajectories

    def killed(self: LocalEngine, number: int, trajectories: Any) -> None:
        if number == step:
            raise Killed
        save(self, number, trajectories)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalEngine, "save_trajectories", killed)
        train_short(folder, **(UNDERSCORED | settings))
    return RunDir(folder)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 to 3, which ended in step 4."""
    return stop_in_step(tmp_path_factory.mktemp("stopped") / "run", 4).path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of another seed."""
    return stop_in_step(tmp_path_factory.mktemp("other") / "run", 4, seed=1).path


NEWEST, OLDER, OLDEST = (f"checkpoints/step_{step:06d}" for step in (3, 2, 1))


def to(name: str, damage: Callable[[Path], None]) -> Callable[[Path, Path], None]:
    return lambda run, other: damage(run / name)


def swap(name: str) -> Callable[[Path, Path], None]:
    def copy(run: Path, other: Path) -> None:
        target = run / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        shutil.copytree(other / name, target) if (other / name).is_dir() else shutil.copy(
            other / name, target
        )

    return copy


def write(name: str, text: str) -> Callable[[Path, Path], None]:
    def put(run: Path, other: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)

    return put


def both(*damages: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    return lambda run, other: [damage(run, other) for damage in damages] and None


# What is done to the run; the file that has to be named (empty: nothing to say); whether the resume is refused.
KINDS: dict[str, tuple[Callable[[Path, Path], None], str, bool]] = {
    "nothing": (lambda run, other: None, "", False),
    "weights cut": (to(f"{NEWEST}/policy/model.safetensors", truncate), "policy/model.safetensors", False),
    "weights emptied": (to(f"{NEWEST}/policy/model.safetensors", empty), "policy/model.safetensors", False),
    "weights gone": (to(f"{NEWEST}/policy/model.safetensors", delete), "policy/model.safetensors", False),
    "weights, one bit": (
        to(f"{NEWEST}/policy/model.safetensors", flip_a_bit),
        "policy/model.safetensors",
        False,
    ),
    "another run's weights": (swap(f"{NEWEST}/policy/model.safetensors"), "policy/model.safetensors", False),
    "another run's checkpoint": (swap(NEWEST), "another run", False),
    "model config, one bit": (to(f"{NEWEST}/policy/config.json", flip_a_bit), "policy/config.json", False),
    "tokenizer cut": (to(f"{NEWEST}/policy/tokenizer.json", truncate), "policy/tokenizer.json", False),
    "critic, one bit": (
        to(f"{NEWEST}/critic/model.safetensors", flip_a_bit),
        "critic/model.safetensors",
        False,
    ),
    "critic's head gone": (
        to(f"{NEWEST}/critic/value_head.safetensors", delete),
        "value_head.safetensors",
        False,
    ),
    "moments, one bit": (to(f"{NEWEST}/optimizer.safetensors", flip_a_bit), "optimizer.safetensors", False),
    "moments cut": (to(f"{NEWEST}/optimizer.safetensors", truncate), "optimizer.safetensors", False),
    "state emptied": (to(f"{NEWEST}/state.json", empty), "state.json", False),
    "waiting batch cut": (to(f"{NEWEST}/stale_0.jsonl", truncate), "stale_0.jsonl", False),
    "its scores, one bit": (to(f"{NEWEST}/stale_0.safetensors", flip_a_bit), "stale_0.safetensors", False),
    "a file more": (write(f"{NEWEST}/policy/adapter_config.json", "{}"), "adapter_config.json", False),
    "hashes gone": (to(f"{NEWEST}/{HASHES}", delete), HASHES, False),
    "hashes, one bit": (to(f"{NEWEST}/{HASHES}", flip_a_bit), HASHES, False),
    "two damaged": (
        both(to(f"{NEWEST}/state.json", delete), to(f"{OLDER}/optimizer.safetensors", flip_a_bit)),
        "optimizer.safetensors",
        False,
    ),
    "all damaged": (
        both(*(to(f"{folder}/state.json", truncate) for folder in (NEWEST, OLDER, OLDEST))),
        "step_000001: state.json",
        True,
    ),
    "a half-written folder": (write("checkpoints/.step_000004.99/state.json", "{"), "", False),
    "config emptied": (to("config.yaml", empty), "config.yaml", True),
    "another run's config": (swap("config.yaml"), "config.yaml", True),
    "config with an unknown key": (write("config.yaml", "sead: 1\n"), "config.yaml", True),
    "manifest gone": (to("manifest.json", delete), "manifest.json", True),
    "manifest cut": (to("manifest.json", truncate), "manifest.json", True),
    "another run's manifest": (swap("manifest.json"), "config.yaml", True),
    "metrics with half a line": (to("metrics.jsonl", append), "", False),
    "metrics gone": (to("metrics.jsonl", delete), "metrics.jsonl", True),
    "metrics, one bit": (to("metrics.jsonl", flip_a_bit), "metrics.jsonl", True),
    "timings emptied": (to("timings.jsonl", empty), "timings.jsonl", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damage_is_told_and_the_run_is_the_same_or_refused(
    kind: str, whole: dict[str, Any], stopped: Path, other: Path, tmp_path: Path
) -> None:
    damage, named, refused = KINDS[kind]
    path = shutil.copytree(stopped, tmp_path / "run")
    damage(path, other)
    config, display = short_config(**UNDERSCORED), QuietDisplay()
    if refused:
        with pytest.raises(UserError) as caught:
            trainer.run(config, RunDir.resume(path, config)[0], display, True)
        assert named in str(caught.value)
        return
    run = RunDir.resume(path, config)[0]
    trainer.run(config, run, display, True)
    found = outcome(run)
    events = found.pop("events").decode()
    assert found == {name: value for name, value in whole.items() if name != "events"}
    told = [message for message in display.messages if "passed over" in message]
    assert bool(named) == bool(told) == ("damaged_checkpoint" in events)
    if named:
        assert named in "".join(told) and named in events


@pytest.mark.slow
def test_what_was_passed_over_is_still_told_after_another_kill(stopped: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stopped, tmp_path / "run")
    flip_a_bit(path / NEWEST / "optimizer.safetensors")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalEngine, "collect", lambda *_: (_ for _ in ()).throw(Killed))
        train_short(path, resume=True, **UNDERSCORED)
    run, _ = train_short(path, resume=True, **UNDERSCORED)
    (event,) = read_jsonl(run.events)
    assert event["step"] == 2 and "optimizer.safetensors" in event["reason"]
    assert (run.checkpoints / "damaged_step_000003").is_dir()


def test_a_damaged_best_policy_is_not_evaluated(tmp_path: Path) -> None:
    run, _ = train_short(tmp_path / "run", update__steps=1)
    best = run.checkpoints / "best"
    (best / "policy" / "README.md").write_text("license: mit")
    assert find_policy(str(run.path)).folder == str(best / "policy")
    flip_a_bit(best / "policy" / "model.safetensors")
    for name in (run.path, best, best / "policy"):
        with pytest.raises(UserError, match=r"(?s)best is damaged.*policy/model\.safetensors has changed"):
            find_policy(str(name))


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, delete], ids=lambda damage: damage.__name__)
def test_a_damaged_cold_start_is_built_again(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path))
    config, display = short_config(sft__steps=1), QuietDisplay()
    folder = Path(resolve_model(config, display))
    whole = hash_file(folder / "model.safetensors")
    damage(folder / "model.safetensors")
    assert resolve_model(config, display) == str(folder)
    assert any("built again: model.safetensors" in message for message in display.messages)
    assert hash_file(folder / "model.safetensors") == whole and not find_damage(folder)


@pytest.mark.slow
def test_another_model_folder_is_refused_by_a_resume(tmp_path: Path) -> None:
    """The reference, the frozen half of LoRA and the tokenizer come from it again."""
    model = shutil.copytree(resolve_model(short_config(), QuietDisplay()), tmp_path / "model")
    settings: dict[str, Any] = {"model": str(model), "hardware__lora_rank": 4}
    train_short(tmp_path / "run", update__steps=1, **settings)
    flip_a_bit(model / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.sha256"):
        train_short(tmp_path / "run", resume=True, update__steps=2, **settings)


ROLL_BACK: dict[str, Any] = {
    "update__steps": 4,
    "checkpoint__every": 1,
    "rollout__batch_size": 8,
    "update__mini_batch_size": 4,
    "update__epochs": 2,
    "optim__lr": 1e-3,
    "optim__warmup_ratio": 0.0,
    "optim__schedule": "constant",
    "alarm__action": "roll_back",
    "alarm__roll_back_lr": 0.1,
    "alarm__ratio_tail": 0.01,
}
ROLL_BACK_PARTS = ("atomic_write", "last_whole_before", "drop_later", "append_event")


@pytest.mark.slow
def test_a_kill_anywhere_in_a_roll_back(tmp_path: Path) -> None:
    """Before each part of it, and before each part of the checkpoint that ends it: the resumed run does it again."""
    whole, _ = train_short(tmp_path / "whole", **ROLL_BACK)
    kept = (whole.path / "rolled_back_1.jsonl").read_bytes()
    assert b"roll_back" in whole.events.read_bytes()

    def killed_when_rolling_back(name: str) -> Any:
        original = getattr(LocalEngine, name)

        def maybe(self: LocalEngine, *arguments: Any) -> Any:
            if list(self.run_dir.path.glob("rolled_back_*")):
                raise Killed
            return original(self, *arguments)

        return maybe

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    for part in (*ROLL_BACK_PARTS, "load", "save"):
        path = tmp_path / part
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            if part in ROLL_BACK_PARTS:
                original = trainer.append_event
                if part == "append_event":  # the alarm's own event comes first

                    def append_or_die(run_dir: RunDir, event: Any, original: Any = original) -> None:
                        if event["kind"] == "roll_back":
                            raise Killed
                        original(run_dir, event)

                    patch.setattr(trainer, part, append_or_die)
                else:
                    patch.setattr(trainer, part, killed)
            else:
                patch.setattr(LocalEngine, part, killed_when_rolling_back(part))
            train_short(path, **ROLL_BACK)
        resumed, _ = train_short(path, resume=True, **ROLL_BACK)
        assert outcome(resumed) == outcome(whole), part
        assert (path / "rolled_back_1.jsonl").read_bytes() == kept
        names = [sorted(p.name for p in run.path.glob("rolled_back_*")) for run in (whole, resumed)]
        assert names[0] == names[1]
