"""Whole runs of two steps through Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_env.task.registry import load_task
from sorl_env.trajectory import read_jsonl
from sorl_train.models.policy import load_critic
from sorl_train.models.tiny import build_tiny_policy

from ...waiting import wait_until
from ..conftest import WORLD
from .conftest import TINY, command, metrics, train

pytestmark = pytest.mark.openrlhf
TASKS = Path(__file__).with_name("tasks")


def launch(words: Sequence[str]) -> subprocess.Popen[str]:
    """A process that heeds Ctrl-C, which a shell's jobs in the background ignore."""
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)


def check_run_folder(run_dir: Path, steps: int = 2) -> list[dict[str, Any]]:
    """What every finished run leaves behind; returns its metrics."""
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(steps + 1))
    for line in lines[1:]:
        assert line["loss/normalizer"] <= 1.0 and "loss/clip_bias_logit" in line
        assert line["loss/grad_norm"] >= 0.0 and "rollout/mismatch_ratio_p99" in line
    assert "eval/success" in lines[0] and "eval/success" in lines[-1]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == steps and summary["final_success"] is not None
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["data"]["train"]["examples"] == 48 and manifest["versions"]["openrlhf"] == "0.11.2"
    assert (run_dir / "report.html").stat().st_size > 10_000
    folder = run_dir / "checkpoints" / f"step_{steps:06d}" / "policy"
    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)
    trajectories = list(read_jsonl(run_dir / "trajectories" / f"step_{steps:06d}.jsonl"))
    assert len(trajectories) == 16 and len({t.id for t in trajectories}) == 16
    for trajectory in trajectories:
        assert trajectory.action_mask.sum() == sum(turn.end - turn.start for turn in trajectory.turns)
    return lines


def always_there(run_dir: Path) -> set[str]:
    """Names of the figures of step 2, less those that only some draws have: late turns, rare classes, no search."""
    timings = (json.loads(line) for line in (run_dir / "timings.jsonl").read_text().splitlines())
    names = {name for line in (*metrics(run_dir), *timings) if line["step"] == 2 for name in line}
    some = re.compile(r"_turn[1-9]|clip_frac_(?!turn)|token_share|tool_p|tool_cached|tool/(answer|duplicate)")
    return {name for name in names if not some.search(name) and name != "time/broadcast_s"}


def test_so_ppo_with_critic_and_reference_and_weights_reach_vllm(tmp_path: Path) -> None:
    """After an update at a rate of 1e-2 the sampler still draws what the trainer would: it has the new weights."""
    settings = {"algo": "so_ppo", "loss__kl_coef": 0.01, "optim__lr": 1e-2, "cluster__zero_stage": 2}
    done = train(tmp_path / "run", **settings)
    assert done.returncode == 0, done.stderr
    lines = check_run_folder(tmp_path / "run")
    assert train(tmp_path / "local", engine="local", **settings).returncode == 0
    names = always_there(tmp_path / "run")
    assert len(names) > 60 and names == always_there(tmp_path / "local")  # the same in both engines
    assert lines[2]["loss/effective_lr"] > 1e-3
    assert "loss/value" in lines[1] and lines[2]["loss/ref_kl"] > 0.01  # it has moved away from the reference
    assert lines[2]["rollout/mismatch_kl"] < 1e-3
    assert lines[2]["rollout/staleness_max"] == 0


def test_async_with_partial_rollouts_is_measured_as_off_policy(tmp_path: Path) -> None:
    """The negative control: the second batch is drawn with older weights, and says so."""
    done = train(
        tmp_path / "run",
        algo="so_ppo",
        optim__lr=1e-2,
        cluster__gpus_per_node=2,
        cluster__async_rollout=True,
        cluster__partial_rollout=True,
        rollout__max_staleness=1,
    )
    assert done.returncode == 0, done.stderr
    lines = check_run_folder(tmp_path / "run")
    assert lines[2]["rollout/mismatch_kl"] > 1e-2  # ten times the bound of the synchronous run
    assert lines[2]["rollout/staleness_max"] == 1
    assert lines[2]["rollout/mismatch_kl_turn0"] > 1e-2


def test_zero_2_with_accumulation_4_corrected_for_vllm_in_bfloat16(tmp_path: Path) -> None:
    """vLLM and the trainer round differently: weights beside 1. Long trajectories are punished on the way."""
    settings = {"correction__mode": "truncate", "correction__level": "turn", "correction__high": 1.001}
    settings |= {"correction__sequence_mask": 0.5, "overlong__buffer": 448, "overlong__exclude": "max_turns"}
    done = train(tmp_path / "run", algo="so_ppo", update__micro_batch_size=2, **settings)
    assert done.returncode == 0, done.stderr
    for line in check_run_folder(tmp_path / "run")[1:]:
        assert line["rollout/mismatch_mean"] > 1e-5 and 0.9 < line["loss/correction_mean"] < 1.001
        assert 0 < line["loss/correction_cut_frac"] < 1 and line["loss/correction_zero_frac"] < 1
        assert -1 < line["reward/overlong"] < 0 and 0 <= line["rollout/overlong_filtered_frac"] < 1


def test_a_task_that_raises_and_a_tool_that_times_out(tmp_path: Path) -> None:
    """Both end their own trajectories only; their rates are logged and nothing of them reaches a gradient.

    GiGPO needs the states of turns, too, which come through Ray with the trajectories. The policy hardly moves here, so
    that it is the reference.
    """
    task = f"{TASKS / 'flaky.py'}:TASK"
    settings = {"algo": "gigpo", "rollout__group_size": 4, "task": task, "task_args": {}}
    settings |= {"loss__kl_coef": 0.01, "optim__lr": 1e-12}
    done = train(tmp_path / "run", **settings, search__timeout_s=0.5, search__retries=0)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "run")
    trajectories = [
        trajectory
        for step in (1, 2)
        for trajectory in read_jsonl(tmp_path / "run" / "trajectories" / f"step_{step:06d}.jsonl")
    ]
    errors = [t.error for t in trajectories if t.excluded]
    assert any("no reply within 0.5 s" in error for error in errors if error), errors
    assert any("ValueError" in error for error in errors if error), errors
    assert 0 < len(errors) < len(trajectories)
    excluded = sum(line["rollout/excluded_rate"] for line in lines[1:]) * 16
    assert (
        excluded == pytest.approx(len(errors)) == sum(line["rollout/stop_error"] for line in lines[1:]) * 16
    )
    assert lines[2]["tool/calls"] > 0 and "loss/shared_state_frac" in lines[2]
    # bfloat16 rounds differently in micro-batches of another width: 1e-13 to 3e-9 were seen, and 7e-5 against vLLM
    assert lines[1]["loss/ref_kl"] < 1e-6 < lines[1]["rollout/mismatch_kl"]


def test_an_error_then_a_kill_in_the_middle_of_a_save_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    """The error saves the run. The kill leaves a half-written checkpoint, and neither it nor a damaged one is taken.

    The critic starts from a folder of its own, with a value head that has learned something.
    """
    run_dir, checkpoints, gone = tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "gone"
    settings: dict[str, Any] = {"task": f"{TASKS / 'fading.py'}:make", "task_args": {"gone": str(gone)}}
    settings |= {"critic": trained_critic(tmp_path / "critic"), "sft__steps": 10, "sft__num_demos": 16}
    settings |= {"checkpoint__keep": 2, "eval__num_examples_final": 4}

    # no checkpoint was due when the prompts could not be read any more, and yet no step is lost
    process = launch(command(run_dir, update__steps=400, checkpoint__every=1000, **settings))
    wait_until_step(run_dir, 1, process)
    gone.touch()
    said, stderr = process.communicate(timeout=240)
    assert process.returncode == 1 and "the questions are gone" in stderr, stderr
    assert "with the value head that is there" in said
    ended = len(metrics(run_dir)) - 1
    assert f"The run is saved up to step {ended}. Go on from there with:" in stderr, stderr
    gone.unlink()

    settings["checkpoint__every"] = 1
    process = launch(command(run_dir, "--resume", update__steps=400, **settings))
    kill_in_a_save(process, run_dir, after=ended + 2)  # what the error saved goes with the first that is due
    process.communicate(timeout=120)
    assert list(checkpoints.glob(".step_*/_actor")), "the kill came too late"
    whole = [path.name for path in sorted(checkpoints.glob("step_*"))]
    assert len(whole) == 2  # none went before its successor was whole
    head = load_file(checkpoints / whole[0] / "_critic" / "value_head.safetensors")
    assert head["bias"].dtype == torch.float32 and float(head["bias"]) == pytest.approx(0.5, abs=0.01)
    cut = next((checkpoints / whole[1] / "_critic").rglob("*optim_states.pt"))
    cut.write_bytes(cut.read_bytes()[:-100])

    step = int(whole[0][5:])
    done = train(run_dir, "--resume", update__steps=step + 1, **settings)
    assert done.returncode == 0, done.stderr
    assert f"passed over {whole[1]}: _critic/" in done.stdout
    assert [line["step"] for line in metrics(run_dir)] == list(range(step + 2))
    assert not list(checkpoints.glob(".*"))
    for part in ("_actor", "_critic"):
        (state,) = (checkpoints / f"step_{step + 1:06d}" / part).rglob("mp_rank_00_model_states.pt")
        assert torch.load(state, weights_only=False)["global_step"] == step + 1


def trained_critic(folder: Path) -> str:
    """A critic as the local engine saves it."""
    build_tiny_policy(load_task("minihop", **WORLD), folder / "start", **TINY)
    critic = load_critic(str(folder / "start"), "cpu")
    torch.nn.init.constant_(critic.head.bias, 0.5)
    critic.save(folder / "critic")
    return str(folder / "critic")


def kill_in_a_save(process: subprocess.Popen[str], run_dir: Path, after: int) -> None:
    """Kill -9 all processes of the run while the shards of a step later than ``after`` are being written."""
    deadline = time.monotonic() + 900
    started: list[tuple[int, str]] = []
    while True:
        writing = [int(path.parent.name[6:12]) for path in run_dir.glob("checkpoints/.step_*/_actor")]
        if any(step > after for step in writing):
            break
        log = run_dir / "openrlhf.log"
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        if not started and newest(run_dir) >= after:
            # looking for them takes longer than a save; the trainer, which drives a save, goes first
            started = sorted(processes_of(run_dir), key=lambda found: not found[1].startswith("ray::Trainer"))
        time.sleep(0.002 if started else 0.2)
    for process_id, _ in [*started, *processes_of(run_dir)]:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def processes_of(run_dir: Path) -> list[tuple[int, str]]:
    """Process ids and titles of all that this run started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_text(errors="replace")
                title = (folder / "cmdline").read_text()
            except OSError:
                continue
            if f"SORL_RUN_DIR={run_dir}\0" in environment:
                found.append((int(folder.name), title))
    return found


def wait_until_nothing_is_left(run_dir: Path) -> None:
    """vLLM's engine is a process of its own below the worker that was killed, and holds the memory."""
    deadline = time.monotonic() + 30
    while left := processes_of(run_dir):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def newest(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*")), default=-1)


def wait_until_step(run_dir: Path, step: int, process: subprocess.Popen[str], saved: bool = False) -> None:
    """Until a step is recorded or ``saved``. Ray, vLLM and DeepSpeed take minutes to start on a busy machine."""
    deadline = time.monotonic() + 500
    while True:
        lines = metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
        if (newest(run_dir) if saved else len(lines) - 1) >= step:
            return
        log = run_dir / "openrlhf.log"
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)


def test_kills_of_the_launcher_and_of_a_worker_and_ctrl_c(tmp_path: Path) -> None:
    """A killed launcher leaves the folder to the process that trains on. Each time the run is resumed.

    The worker is a vLLM engine, to which the trainer's workers broadcast; test_worker_watchdog.py ends any kind.
    """
    run_dir = tmp_path / "run"
    process = launch(command(run_dir, update__steps=400, checkpoint__every=1))
    wait_until_step(run_dir, 1, process, saved=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for word in ("--resume", "--overwrite"):
        refused = train(run_dir, word)
        found = re.search(rf"{run_dir} is in use by process (\d+):", refused.stderr)
        assert refused.returncode == 2 and found is not None, refused.stderr
    driver = int(found[1])
    assert "openrlhf.driver" in Path(f"/proc/{driver}/cmdline").read_text()
    before = len(metrics(run_dir))
    wait_until(lambda: len(metrics(run_dir)) > before)
    os.kill(driver, signal.SIGINT)
    wait_until_nothing_is_left(run_dir)

    process = launch(command(run_dir, "--resume", update__steps=400, checkpoint__every=1))
    wait_until_step(run_dir, newest(run_dir) + 1, process, saved=True)
    names = ("ray::RolloutWorker", "ray::RolloutRayActor")
    engine = next(number for number, title in processes_of(run_dir) if title.startswith(names))
    os.kill(engine, signal.SIGKILL)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=90)
    assert time.monotonic() - started < 60
    assert process.returncode == 1
    wait_until_nothing_is_left(run_dir)
    assert " died" in stderr and f"sorl-train --resume --run_dir {run_dir}" in stderr, stderr

    saved, last = newest(run_dir), metrics(run_dir)[-1]["step"]  # a step may be recorded and not be saved
    process = launch(command(run_dir, "--resume", update__steps=400, checkpoint__every=1000))
    wait_until_step(run_dir, last + 1, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert f"sorl-train --resume --run_dir {run_dir}" in stderr
    assert newest(run_dir) == metrics(run_dir)[-1]["step"] > saved
    assert [line["step"] for line in metrics(run_dir)] == list(range(newest(run_dir) + 1))


def test_the_alarm_stops_a_run_and_gives_the_command_that_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {"alarm__action": "stop", "alarm__ratio_tail": 1e-9, "update__epochs": 2}
    done = train(run_dir, update__steps=400, **settings)
    assert done.returncode == 0, done.stderr
    steps = json.loads((run_dir / "summary.json").read_text())["steps"]
    assert steps < 4 and f"ended by the collapse alarm after step {steps} (alarm.action=stop)" in done.stdout
    again = f"sorl-train --config {run_dir}/config.yaml --model {run_dir}/checkpoints/best/policy --update.trust_kl"
    assert again in done.stdout
