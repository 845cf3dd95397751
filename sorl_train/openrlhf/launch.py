"""Start a run on OpenRLHF, show its steps, and end it if it makes no progress.

OpenRLHF runs in a process of its own, with a log of its own (``openrlhf.log`` in the run's folder). The process here
needs no GPU: it reads the metrics and events that the run writes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sorl_env.envs.prompts import check_prompts
from sorl_env.errors import UserError, installed
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import load_tokenizer, model_shape
from sorl_train.openrlhf.engine_limits import (
    check,
    check_attention,
    check_gpus,
    check_model,
    check_versions,
    critic_start,
)
from sorl_train.openrlhf.flags import Placement, as_arguments, openrlhf_flags
from sorl_train.rollout.environments import make_env, record_facts
from sorl_train.run.alarm import ALARM
from sorl_train.run.checkpoint import resume_point, rewind, tell_state
from sorl_train.run.display import Display, finish_step_on_interrupt
from sorl_train.run.files import HELD, read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.recorder import ENDED
from sorl_train.run.stability import next_moves
from sorl_train.sft.cold_start import resolve_model

LOG = "openrlhf.log"
CPU_MODE = Path(__file__).with_name("cpu_mode")
WITHOUT_FLASH_ATTN = Path(__file__).with_name("without_flash_attn")
CPU_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
LAST_LINES = 15  # of the log, which an error message shows
_EXCEPTION = re.compile(
    r"^(?:[a-zA-Z_]\w*\.)*(?P<name>Stopped|[A-Z]\w*(?:Error|Exception))(?:\([^)]*\))?: ?(?P<text>.*)$"
)
START = "==== a start of this run ====\n"  # in the log, which goes on at a resume
STOPPED = "Stopped: "  # how the cause of death begins after Ctrl-C; see ``train_step.Stopped``
POLL_S = 0.5
GRACE_S = 60.0  # between asking a process to end and killing it


def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """Train to the end; returns the summary that the run wrote.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the step in progress is finished and saved.
        UserError: the run cannot start, or broke down; the message says where to look.
    """
    check(config)
    check_versions()
    check_attention(config.cluster.flags)
    point = resume_point(run_dir) if resume else None
    if config.hardware.device == "cpu":
        os.environ.update(CPU_ENVIRONMENT)
    else:
        check_gpus(config.cluster)
    env = make_env(config)
    eval_env = make_env(config, evaluation=True)
    record_facts(config, run_dir, env, eval_env)
    begun = dataclasses.replace(config, limits=run_dir.begun_limits(config.limits))
    model = resolve_model(begun, display)
    check_model(model_shape(model), config.cluster.vllm_tensor_parallel, config.model)
    template, tell = config.chat_template, display.message
    check_prompts([env, eval_env], load_tokenizer(model), use_chat_template=template, tell=tell)
    flags = openrlhf_flags(config, run_dir, model, env.limits, resume=point.path if point else None)
    if point:
        run_dir.begin_resume()
        rewind(run_dir, point.path)
        tell_state(run_dir, display.message, point)
    elif config.algorithm.needs_critic:
        display.message(critic_start(config.critic or model))
    place, on_cpu = Placement.of(config.cluster), config.hardware.device == "cpu"
    where = "CPU" if on_cpu else f"{place.gpus} GPUs"
    done = point.step if point else -1  # step 0 is the evaluation before the first step
    display.start(
        f"{config.algo} on {env.task.name} with OpenRLHF, {where}", config.update.steps, max(done, 0)
    )
    display.message(f"starting Ray, DeepSpeed and vLLM takes minutes; their log is {run_dir.path / LOG}")
    with _process(
        as_arguments(flags), _environment(run_dir, place.gpus if on_cpu else 0), run_dir
    ) as process:
        follow(process, run_dir, display, config.cluster.deadline_s, from_step=done)
    if process.returncode:
        raise UserError(_breakdown(process.returncode, run_dir))
    summary: dict[str, Any] = json.loads(run_dir.summary.read_text(encoding="utf-8"))
    if summary["steps"] < config.update.steps:
        display.message(next_moves(config.optim.lr, config.update.trust_kl, run_dir, summary["best_step"]))
    return summary


def follow(
    process: subprocess.Popen[bytes], run_dir: RunDir, display: Display, deadline_s: float, from_step: int
) -> None:
    """Show each step as it is logged, until the process ends.

    Raises ``KeyboardInterrupt`` after Ctrl-C, once the run has ended, and ``UserError`` if nothing was written for
    ``deadline_s`` seconds.
    """
    shown, grown_at, size = from_step, time.monotonic(), -1
    told = len(read_jsonl(run_dir.events))
    with finish_step_on_interrupt(display) as interrupted:
        while True:
            ended = process.poll() is not None
            for metrics in _metrics_after(run_dir, shown):
                shown = metrics.pop("step")
                display.step(shown, metrics)
            events = read_jsonl(run_dir.events)
            for event in events[told:]:
                at = f"step {event['step']}: "
                what = {ALARM: f"collapse alarm in {at}", ENDED: ""}.get(event["kind"], at)
                display.message(what + event["reason"])
            told = len(events)
            if ended:
                break
            if interrupted.is_set():
                run_dir.stop_file.touch()
            if _written(run_dir) != size:
                grown_at, size = time.monotonic(), _written(run_dir)
            if time.monotonic() - grown_at > deadline_s:
                _end(process)
                raise UserError(
                    f"OpenRLHF wrote nothing for {deadline_s:.0f} s (cluster.deadline_s) after step {shown}, and was "
                    f"ended. {_tail(run_dir)}"
                )
            time.sleep(POLL_S)
        # otherwise it broke down after Ctrl-C
        if interrupted.is_set() and process.returncode and cause_of_death(_log(run_dir)).startswith(STOPPED):
            raise KeyboardInterrupt


def import_folders(on_cpu: bool) -> list[str]:
    """The folders that come first on the import path of every process of a run."""
    stand_ins = {CPU_MODE: on_cpu, WITHOUT_FLASH_ATTN: not installed("flash-attn")}
    return [str(folder) for folder, is_needed in stand_ins.items() if is_needed]


def _environment(run_dir: RunDir, pretended_gpus: int) -> dict[str, str]:
    """Environment variables of the process and, through Ray, of all workers; on a CPU, GPUs are pretended to Ray."""
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [*import_folders(bool(pretended_gpus)), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "SORL_RUN_DIR": str(run_dir.path.absolute()),
        "SORL_START": uuid.uuid4().hex,
        "SORL_FOLDER": str(Path.cwd()),
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM's engine is a child of a Ray worker: without this it outlives a killed worker and keeps the GPU's memory
        "RAY_process_group_cleanup_enabled": "true",
    }
    if pretended_gpus:
        variables["SORL_LOGICAL_GPUS"] = str(pretended_gpus)
    return variables


@contextmanager
def _process(
    arguments: list[str], environment: dict[str, str], run_dir: RunDir
) -> Iterator[subprocess.Popen[bytes]]:
    run_dir.stop_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sorl_train.openrlhf.driver", *arguments]
    with (run_dir.path / LOG).open("ab", buffering=0) as log:
        log.write(START.encode())
        # it trains on if this process is killed, and so it holds the run's lock as well
        lock = None if run_dir.lock is None else run_dir.lock.descriptor
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | ({} if lock is None else {HELD: str(lock)}),
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started; Ray's own processes end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _metrics_after(run_dir: RunDir, step: int) -> list[dict[str, Any]]:
    """Metrics of the steps after ``step``, with their timings."""
    timings = {line["step"]: line for line in read_jsonl(run_dir.timings)}
    later = [line for line in read_jsonl(run_dir.metrics) if line["step"] > step]
    return [timings.get(line["step"], {}) | line for line in later]


def _written(run_dir: RunDir) -> int:
    """Bytes of the log and the metrics, which grow as long as a run makes progress."""
    files = (run_dir.path / LOG, run_dir.metrics)
    return sum(file.stat().st_size for file in files if file.is_file())


def _log(run_dir: RunDir) -> str:
    """What was logged since the last start."""
    return (run_dir.path / LOG).read_text(encoding="utf-8", errors="replace").rpartition(START)[2]


def _breakdown(status: int, run_dir: RunDir) -> str:
    """An error message about what ended OpenRLHF, as far as its log says."""
    cause = cause_of_death(_log(run_dir))
    reason = cause or f"it ended with status {status}. {_tail(run_dir)}"
    return f"OpenRLHF stopped: {reason}\nIts log is {run_dir.path / LOG}."


def cause_of_death(log: str) -> str:
    """The last exception in a log that is not just Ray's wrapper of another one; empty if there is none."""
    lines = log.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        found = _EXCEPTION.match(lines[number])
        if found is None or found["name"] == "RayTaskError":
            continue
        rest = list(
            itertools.takewhile(lambda line: line and "\x1b[" not in line, lines[number + 1 : number + 9])
        )
        if found["name"] == "ActorDiedError":
            who = next((line.split()[-1] for line in rest if "class_name:" in line), "")
            return f"the worker {who} died"
        text = "\n".join([found["text"], *rest])
        return text if found["name"] == "UserError" else f"{found['name']}: {text}"
    return ""


def _tail(run_dir: RunDir) -> str:
    kept = "\n".join(f"  {line}" for line in _log(run_dir).splitlines()[-LAST_LINES:])
    return f"The end of its log:\n{kept}"
