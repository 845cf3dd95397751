"""A run on OpenRLHF: start it, show it, watch it, end it.

OpenRLHF runs in a process of its own with a log of its own (``openrlhf.log`` in the run's folder). This one needs
neither torch nor a GPU: it follows the metrics that the run writes, and ends a run that makes no progress.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig
from sorl_train.openrlhf.flags import as_arguments, check, critic_start, openrlhf_flags, unread
from sorl_train.openrlhf.placement import Placement
from sorl_train.openrlhf.saves import ACTOR, CRITIC, POLICY, ResumePoint, resume_point
from sorl_train.openrlhf.versions import check_versions
from sorl_train.rollout.environments import env_facts, make_env
from sorl_train.run.display import Display
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import resolve_model

LOG = "openrlhf.log"
CPU_MODE = Path(__file__).with_name("cpu_mode")
CPU_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
LAST_LINES = 15  # of the log, in an error
_EXCEPTION = re.compile(
    r"^(?:[a-zA-Z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Stopped))(?:\([^)]*\))?: ?(?P<text>.*)$"
)
WORKERS = {
    "RolloutRayActor": "a vLLM engine",
    "PolicyModelActor": "a training worker of the policy",
    "CriticModelActor": "a training worker of the critic",
    "ReferenceModelActor": "a worker of the reference model",
    "PPOTrainer": "the trainer",
    "PPOTrainerAsync": "the trainer",
}
POLL_S = 0.5
GRACE_S = 60.0  # between asking a run to end and killing it


def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """Train to the end; returns the summary that the run wrote.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the step in progress is finished and saved.
        UserError: the run cannot start, or broke down; the message says where to look.
    """
    check(config)
    check_versions()
    if config.hardware.device == "cpu":
        os.environ.update(CPU_ENVIRONMENT)
    env = make_env(config)
    facts = {"train": env_facts(env), "eval": env_facts(make_env(config, evaluation=True))}
    run_dir.record("data", facts)
    start = _resume_point(config, run_dir, display) if resume else None
    model = resolve_model(config, display)
    flags = openrlhf_flags(config, run_dir, model, env.limits, resume=start.folder if start else None)
    if config.algorithm.needs_critic and start is None:
        display.message(critic_start(config, model))
    for line in unread(config):
        display.message(line)
    place = Placement.of(config)
    where = "CPU" if config.hardware.device == "cpu" else f"{place.gpus} GPUs"
    done = start.step if start else -1  # step 0 is the evaluation before the first one
    display.start(
        f"{config.algo} on {env.task.name} with OpenRLHF, {where}", config.update.steps, max(done, 0)
    )
    display.message(f"starting Ray, DeepSpeed and vLLM takes minutes; their log is {run_dir.path / LOG}")
    with _process(as_arguments(flags), _environment(config, run_dir), run_dir) as process:
        follow(process, run_dir, display, config.cluster.deadline_s, from_step=done)
    if process.returncode:
        raise UserError(_breakdown(process.returncode, run_dir))
    summary: dict[str, Any] = json.loads(run_dir.summary.read_text(encoding="utf-8"))
    if summary["steps"] < config.update.steps:
        display.message(f"ended after step {summary['steps']} (eval.patience or alarm.action)")
    return summary


def follow(
    process: subprocess.Popen[bytes], run_dir: RunDir, display: Display, deadline_s: float, from_step: int
) -> None:
    """Show each step as it is logged, until the process ends.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the run has ended.
        UserError: nothing was written for ``deadline_s`` seconds.
    """
    shown, moved, size = from_step, time.monotonic(), -1
    told = len(read_jsonl(run_dir.events)) if run_dir.events.is_file() else 0
    with _stop_on_interrupt(process, run_dir, display) as stopping:
        while True:
            ended = process.poll() is not None
            for metrics in _metrics_after(run_dir, shown):
                shown = metrics.pop("step")
                display.step(shown, metrics)
            events = read_jsonl(run_dir.events) if run_dir.events.is_file() else []
            for event in events[told:]:
                display.message(f"collapse alarm in step {event['step']}: {event['reason']}")
            told = len(events)
            if ended:
                break
            now_size = _written(run_dir)
            if now_size != size:
                moved, size = time.monotonic(), now_size
            if time.monotonic() - moved > deadline_s:
                _end(process)
                raise UserError(
                    f"OpenRLHF wrote nothing for {deadline_s:.0f} s (cluster.deadline_s) after step {shown}, and was "
                    f"ended. {_tail(run_dir)}\n{_again(run_dir)}"
                )
            time.sleep(POLL_S)
        if stopping and process.returncode:
            raise KeyboardInterrupt


def _resume_point(config: TrainConfig, run_dir: RunDir, display: Display) -> ResumePoint:
    """The checkpoint to go on from; tells the user of newer ones that are damaged."""
    parts = [POLICY, ACTOR, *([CRITIC] if config.algorithm.needs_critic else [])]
    found = resume_point(run_dir.checkpoints, parts)
    for line in found.passed_over:
        display.message(f"passed over {line}")
    return found


def _environment(config: TrainConfig, run_dir: RunDir) -> dict[str, str]:
    """Of the process and, through Ray, of all workers."""
    variables = os.environ | {
        "SORL_RUN_DIR": str(run_dir.path.absolute()),
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM's engine is a child of a Ray worker: it would outlive one that is killed, with the GPU's memory
        "RAY_process_group_cleanup_enabled": "true",
    }
    if config.hardware.device == "cpu":
        path = [str(CPU_MODE), *filter(None, [variables.get("PYTHONPATH")])]
        variables |= {
            "PYTHONPATH": os.pathsep.join(path),
            "SORL_LOGICAL_GPUS": str(Placement.of(config).gpus),
        }
    return variables


@contextmanager
def _process(
    arguments: list[str], environment: dict[str, str], run_dir: RunDir
) -> Iterator[subprocess.Popen[bytes]]:
    run_dir.stop_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sorl_train.openrlhf.driver", *arguments]
    with (run_dir.path / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started: Ray's own processes end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def _stop_on_interrupt(
    process: subprocess.Popen[bytes], run_dir: RunDir, display: Display
) -> Iterator[list[int]]:
    """The first Ctrl-C (or SIGTERM) lets the step in progress finish and be saved; a second one stops at once."""
    stopping: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping:
            raise KeyboardInterrupt
        stopping.append(number)
        run_dir.stop_file.touch()
        display.message("stopping after this step and its checkpoint; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _metrics_after(run_dir: RunDir, step: int) -> list[dict[str, Any]]:
    """Lines of the steps after ``step``, with their timings."""
    if not run_dir.metrics.is_file():
        return []
    timings = (
        {line["step"]: line for line in read_jsonl(run_dir.timings)} if run_dir.timings.is_file() else {}
    )
    return [
        timings.get(line["step"], {}) | line for line in read_jsonl(run_dir.metrics) if line["step"] > step
    ]


def _last_step(run_dir: RunDir) -> int:
    """The newest checkpoint's step; -1 if there is none."""
    steps = [int(path.name.removeprefix("step_")) for path in run_dir.checkpoints.glob("step_*")]
    return max(steps, default=-1)


def _written(run_dir: RunDir) -> int:
    """Bytes of the log and the metrics: what a run that is alive adds to."""
    files = (run_dir.path / LOG, run_dir.metrics)
    return sum(file.stat().st_size for file in files if file.is_file())


def _breakdown(status: int, run_dir: RunDir) -> str:
    """What ended OpenRLHF, as far as its log tells."""
    log = (run_dir.path / LOG).read_text(encoding="utf-8", errors="replace")
    cause = cause_of_death(log)
    reason = cause or f"it ended with status {status}. {_tail(run_dir)}"
    return f"OpenRLHF stopped: {reason}\nIts log is {run_dir.path / LOG}. {_again(run_dir)}"


def cause_of_death(log: str) -> str:
    """The last exception in a log that is not one of Ray's wrappers; empty if there is none."""
    lines = log.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        found = _EXCEPTION.match(lines[number])
        if found is None or found["name"] == "RayTaskError":
            continue
        rest = list(
            itertools.takewhile(lambda line: line and "\x1b[" not in line, lines[number + 1 : number + 9])
        )
        if found["name"] == "ActorDiedError":
            who = next((line.split()[-1] for line in rest if "class_name:" in line), "a worker")
            return f"{WORKERS.get(who, who)} died"
        text = "\n".join([found["text"], *rest])
        return text if found["name"] == "UserError" else f"{found['name']}: {text}"
    return ""


def _tail(run_dir: RunDir) -> str:
    lines = (run_dir.path / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    kept = "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
    return f"The end of its log:\n{kept}"


def _again(run_dir: RunDir) -> str:
    if run_dir.has_checkpoint:
        return f"Go on from step {_last_step(run_dir)}: sorl-train --resume --run_dir {run_dir.path}"
    return "There is no checkpoint yet: start it again."
