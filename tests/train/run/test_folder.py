"""The run folder, its metrics files, and per-token figures as a file."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import importlib.machinery
import json
import math
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import numpy
import pytest
import torch

from sorl_env.commands.command import about_os_error
from sorl_env.errors import UserError
from sorl_env.trajectory import write_jsonl
from sorl_train.config.files import config_hash, read_resolved
from sorl_train.config.settings import TrainConfig, UpdateConfig
from sorl_train.run import folder
from sorl_train.run.checkpoint import atomic_folder
from sorl_train.run.files import append_line, atomic_write, read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.manifest import environment_facts
from sorl_train.run.metrics_log import (
    MetricsLog,
    TokenRecord,
    iter_token_records,
    sidecar_of,
    write_token_records,
)


def with_steps(steps: int) -> TrainConfig:
    return TrainConfig(update=UpdateConfig(steps=steps))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", with_steps(4))


# -- atomic writes ---------------------------------------------------------------------------------------------
def test_atomic_write_replaces_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def fill(path: Path) -> None:
    with atomic_folder(path) as folder:
        (folder / "file").write_text("new")


WRITERS = {"file": lambda path: atomic_write(path, "new"), "line": lambda path: append_line(path, "new\n")}
WRITERS |= {"trajectories": lambda path: write_jsonl(path, []), "folder": fill}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that the user knows; an error of writing has none, and a temporary file's says nothing."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        WRITERS[kind](tmp_path / "name")
    message = about_os_error(caught.value) or ""
    assert message.startswith(f"{tmp_path / 'name'}: no space left on device: free some space there")


# -- a new run -------------------------------------------------------------------------------------------------
def test_a_new_run_records_what_it_is(run: RunDir) -> None:
    assert read_resolved(run.config) == with_steps(4)
    manifest = run.read_manifest()
    assert manifest["seed"] == 0
    assert manifest["config_sha256"] == config_hash(with_steps(4))
    assert {"python", "torch"} <= set(manifest["versions"])
    assert manifest["hardware"]["cores"] >= 1
    assert run.trajectories.is_dir() and run.checkpoints.is_dir()


def test_a_run_is_not_overwritten(run: RunDir) -> None:
    with pytest.raises(UserError, match="unfinished run") as error:
        RunDir.create(run.path, with_steps(4))
    assert "--resume" not in str(error.value)  # there is no checkpoint yet
    (run.checkpoints / "step_000000").mkdir()
    with pytest.raises(UserError, match="unfinished run") as error:
        RunDir.create(run.path, with_steps(4))
    for next_move in (f"--resume --run_dir {run.path}", f"--run_dir {run.path}-2", "--overwrite"):
        assert next_move in str(error.value)
    run.write_summary({"final_success": 1.0})
    with pytest.raises(UserError, match="a finished run") as error:
        RunDir.create(run.path, with_steps(4))
    assert "--resume" not in str(error.value)


def test_the_next_move_is_a_line_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path / "w x", with_steps(4))
    (run.checkpoints / "step_000000").mkdir()
    monkeypatch.chdir(run.path)
    for given, resumed in ((run.path, f"'{run.path}'"), (Path(), ".")):
        with pytest.raises(UserError) as error:
            RunDir(given).check_free()
        assert f"--resume --run_dir {resumed}), give another folder (--run_dir '{run.path}-2'), " in str(
            error.value
        )


def test_overwrite_moves_the_old_run_aside(run: RunDir) -> None:
    run.write_summary({"final_success": 1.0})
    for number in (2, 3):
        new = RunDir.create(run.path, with_steps(4), overwrite=True)
        assert not new.summary.exists()
        assert run.path.with_name(f"run-{number}").is_dir()
    assert json.loads((run.path.with_name("run-2") / "summary.json").read_text()) == {"final_success": 1.0}


def test_a_foreign_folder_or_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="is not a run folder"):
        RunDir.create(tmp_path / "notes", TrainConfig())
    with pytest.raises(UserError, match="is not a run folder"):
        RunDir.create(tmp_path / "notes", TrainConfig(), overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        RunDir.create(tmp_path / "notes" / "thesis.tex", TrainConfig())


def test_a_start_that_was_killed_before_the_config_leaves_a_free_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert not RunDir(tmp_path / "run")._is_taken()  # nor is an empty one
    for name in ("trajectories", "checkpoints"):
        (tmp_path / "run" / name).mkdir()
    (tmp_path / "run" / ".config.yaml.0a1b2c3d").write_text("algo: so_p")
    run = RunDir.create(tmp_path / "run", with_steps(4))
    assert not list(run.path.glob(".*")) and run.read_manifest()
    assert not run.path.with_name("run-2").exists()


def test_a_run_in_which_nothing_happened_can_be_discarded_and_no_other(run: RunDir) -> None:
    run.metrics.write_text("{}\n")
    run.discard_if_unused()
    assert run.config.is_file() and run.metrics.is_file()
    run.metrics.unlink()
    run.discard_if_unused()
    assert not run.path.exists()


# -- resuming --------------------------------------------------------------------------------------------------
def test_another_environment_is_said_because_exactness_ends_there(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = environment_facts()
    versions = facts["versions"] | {"torch": "9.9.0", "vllm": "1.0"}
    monkeypatch.setattr(
        folder, "environment_facts", lambda: facts | {"versions": versions, "command": ["other"]}
    )
    _, (said,) = RunDir.resume(run.path, with_steps(4))
    old = facts["versions"]["torch"]
    assert said == (
        f"from here on its numbers are not exactly the same: environment.versions.torch: {old!r} then, '9.9.0' now; "
        "environment.versions.vllm: None then, '1.0' now"
    )


def test_resume_names_what_may_change_and_what_may_not(run: RunDir) -> None:
    again, changes = RunDir.resume(run.path, with_steps(9))
    assert changes == ["update.steps: 4 -> 9"]
    assert read_resolved(run.config).update.steps == 4  # data or files may refuse it yet
    again.begin_resume()
    assert read_resolved(run.config).update.steps == 9
    other = dataclasses.replace(with_steps(9), seed=5, algo="ppo")
    with pytest.raises(UserError) as error:
        RunDir.resume(run.path, other)
    assert "seed: 0 in the run, 5 now" in str(error.value)
    assert "algo: 'so_ppo' in the run, 'ppo' now" in str(error.value)
    assert read_resolved(run.config).seed == 0


def test_a_finished_run_resumes_only_for_more_steps(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on after a kill between the writes of its beginning."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    run.write_summary({})
    with pytest.raises(UserError, match=r"finished run; train it longer with --update\.steps"):
        RunDir.resume(run.path, with_steps(4))
    again, _ = RunDir.resume(run.path, with_steps(5))
    assert again.summary.exists() and not again.begun
    again.begin_resume()
    assert not again.summary.exists() and again.begun
    run.write_summary({})
    killed, _ = RunDir.resume(run.path, with_steps(6))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", interrupted)
        killed.begin_resume()
    RunDir.resume(run.path, with_steps(6))


# -- the manifest ----------------------------------------------------------------------------------------------
def test_facts_are_recorded_once_and_checked_afterwards(run: RunDir) -> None:
    facts = {"train": {"source": "embedded", "sha256": "aa", "sizes": (1, 2)}}
    run.record("data", facts)
    run.record("data", facts)
    assert run.read_manifest()["data"] == {"train": {"source": "embedded", "sha256": "aa", "sizes": [1, 2]}}
    with pytest.raises(UserError, match=r"data\.train\.sha256: 'aa' then, 'bb' now"):
        run.record("data", {"train": {"source": "embedded", "sha256": "bb", "sizes": (1, 2)}})


# -- metrics ---------------------------------------------------------------------------------------------------
def test_metrics_and_timings_go_to_their_own_files(run: RunDir) -> None:
    """Sorted, as floats unless they are integers; a half line is not read."""
    with closing(MetricsLog(run, tensorboard=False)) as log:
        log.log(1, {"loss/b": torch.tensor(2.0), "time/step_s": 2.5, "loss/a": 3, "loss/c": True})
        log.log(2, {"loss/a": float("nan"), "loss/b": float("-inf"), "loss/c": numpy.float64(1 / 3)})
    assert run.metrics.read_text() == (
        '{"step": 1, "loss/a": 3, "loss/b": 2.0, "loss/c": 1.0}\n'
        '{"step": 2, "loss/a": null, "loss/b": null, "loss/c": 0.3333333333333333}\n'
    )
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "lo')  # of a killed run
    assert [line["step"] for line in read_jsonl(run.metrics)] == [1, 2]
    assert read_jsonl(run.events) == []  # there is no file
    assert run.timings.read_text() == '{"step": 1, "time/step_s": 2.5}\n'


def test_tensorboard_shows_a_step_that_was_taken_back_once(run: RunDir) -> None:
    """And no figure that is not finite."""
    pytest.importorskip("tensorboard", reason="needs tensorboard (the train extra)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(MetricsLog(run)) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss/a": float(step), "loss/b": float("nan")})
    with closing(MetricsLog(run)) as log:  # as a resume from step 1 does
        log.log(2, {"loss/a": 20.0})
    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert events.Tags()["scalars"] == ["loss/a"]
    assert [(event.step, event.value) for event in events.Scalars("loss/a")] == [(1, 1.0), (2, 20.0)]


def test_weights_and_biases_gets_the_finite_metrics_of_one_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = MagicMock(__spec__=importlib.machinery.ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        with closing(MetricsLog(run, tensorboard=False, wandb="mine")) as log:
            log.log(3, {"loss/a": 1.0, "loss/b": float("nan"), "time/s": 2.0})
    assert wandb.init.return_value.log.mock_calls == [call({"loss/a": 1.0, "time/s": 2.0}, step=3)] * 2
    assert wandb.init.return_value.finish.call_count == 2
    first, second = (started.kwargs for started in wandb.init.call_args_list)
    assert first["id"] == second["id"] and first["id"].startswith("run-20")
    assert (first["project"], first["resume"], first["config"]["seed"]) == ("mine", "allow", 0)


def test_trackio_keeps_the_finite_metrics_of_one_run(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs pip install trackio")
    code = (  # a process of its own: the folder is read at import
        "import sys; from pathlib import Path; from trackio.sqlite_storage import SQLiteStorage as Storage\n"
        "from sorl_train.run.folder import RunDir; from sorl_train.run.metrics_log import MetricsLog\n"
        "for step in (3, 4):\n"
        "    log = MetricsLog(RunDir(Path(sys.argv[1])), tensorboard=False, trackio='mine')\n"
        "    log.log(step, {'loss/a': 1.0 + step, 'loss/b': float('nan')}); log.close()\n"
        "(name,) = Storage.get_runs('mine')\n"
        "rows = Storage.get_logs('mine', name)\n"
        "print([name.split('-')[0], *({k: row[k] for k in row if k != 'timestamp'} for row in rows)])"
    )
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    stored = "['run', {'loss/a': 4.0, 'step': 3}, {'loss/a': 5.0, 'step': 4}]"
    assert stored in done.stdout.splitlines()


@pytest.mark.parametrize(
    "line", [b"{", b"[1]", b"\xff\xfe\x00", b'"x', b"nul", b"[" * 100_000, b'{"step": 1e']
)
def test_a_damaged_line_of_the_metrics_is_named(run: RunDir, line: bytes) -> None:
    run.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: .*copy"):
        read_jsonl(run.metrics)


def test_a_line_is_written_whole_where_the_disk_takes_parts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with closing(MetricsLog(run, tensorboard=False)) as log:
        log.log(1, {"loss/a": 0.5})
    assert run.metrics.read_text() == '{"step": 1, "loss/a": 0.5}\n'


EXACT: dict[str, Any] = {"id": "s1-p0/0", "tokens": ["<think>", "é\u2028", "</script>"], "turn": [0, 0, 1]}
EXACT |= {"advantage": [-1.5, 0.25, 0.0], "clipped": [0, 0, 1]}
RECORD = TokenRecord(
    log_ratio=[0.123456, -0.00001, math.nan],
    ratio=[1.131400, 1.0, math.inf],
    entropy=[2.0, 0.33336, 1e-9],
    **EXACT,
)
LINE = EXACT | {"log_ratio": [0.1235, 0.0, None], "ratio": [1.1314, 1.0, None], "entropy": [2.0, 0.3334, 0.0]}


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    write_token_records(path, [RECORD, TokenRecord("s1-p0/1", [], [], [], [], [], [], [])])
    raw = gzip.decompress(path.read_bytes())
    lines = raw.decode().splitlines()
    assert [len(lines), json.loads(lines[0]), b"-0.0" in raw, b"NaN" in raw] == [2, LINE, False, False]
    first, second = iter_token_records(path)
    assert (first.tokens, first.turn, first.clipped) == (RECORD.tokens, [0, 0, 1], [0, 0, 1])
    assert first.ratio[:2] == [1.1314, 1.0] and math.isnan(first.ratio[2])
    assert (second.id, second.tokens) == ("s1-p0/1", [])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_file_of_a_step(tmp_path: Path) -> None:
    step = tmp_path / "step_000010.jsonl"
    assert sidecar_of(step) is None
    beside = tmp_path / "step_000010.tokens.jsonl.gz"
    write_token_records(beside, [RECORD])
    assert sidecar_of(step) == beside
    assert list(tmp_path.glob("step_*.jsonl")) == []


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"id": "s1"', "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps({k: v for k, v in LINE.items() if k != "entropy"}), "KeyError.'entropy'"),
        (json.dumps(LINE | {"ratio": [1.0]}), "sequences of different lengths"),
        (json.dumps(LINE | {"ratio": ["high", 1.0, 1.0]}), "could not convert string to float"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(LINE)}\n{line}\n".encode()))
    with pytest.raises(UserError, match=f"tokens.jsonl.gz:2: .*{message}"):
        list(iter_token_records(path))


def test_a_stream_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    write_token_records(path, [RECORD])
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match="the gzip stream is broken"):
        list(iter_token_records(path))
