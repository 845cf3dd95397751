"""Training on one machine: PPO, GRPO, and what SORL makes of them. ``train`` is the algorithm.

Off-policy in two ways: by reuse (mini-batches and epochs over one rollout batch) and, with ``rollout.max_staleness``,
by lag (a batch is trained on that many steps after it was sampled). Ratios are taken to the log-probabilities that
the trainer computed when the batch was collected.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

import torch

from sorl_env.errors import UserError
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.engine import LocalEngine
from sorl_train.evaluate.find_policy import fingerprint
from sorl_train.learner.scored_batch import estimate_advantages
from sorl_train.learner.state import Collected
from sorl_train.learner.update import NonFiniteError
from sorl_train.rollout.environments import env_facts
from sorl_train.rollout.metrics import rollout_metrics, staleness
from sorl_train.run.alarm import Alarm, append_event
from sorl_train.run.cards.trajectories import write_trajectory_card
from sorl_train.run.checkpoint import (
    Whole,
    drop_later,
    last_whole_before,
    list_checkpoints,
    logs_at,
    resume_point,
    set_aside,
)
from sorl_train.run.display import Display
from sorl_train.run.files import atomic_write, read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.log_lengths import cut_logs
from sorl_train.run.metrics_log import MetricsLog
from sorl_train.run.summary import out_of_patience
from sorl_train.sft.cold_start import resolve_model

MAX_LOST_STEPS = 3  # steps in a row without one usable trajectory before the run stops


def train(engine: LocalEngine, log: MetricsLog, interrupted: threading.Event) -> None:
    """The algorithm (Alg. 1 and 2 of the paper): sample, score, estimate advantages, update; then log and save."""
    config, steps = engine.config, engine.config.update.steps
    while engine.step < steps and not interrupted.is_set() and not engine.ended:
        step = engine.step + 1
        while len(engine.waiting) <= config.rollout.max_staleness and step + len(engine.waiting) <= steps:
            engine.waiting.append(engine.collect(step + len(engine.waiting)))
        collected = engine.waiting.popleft()
        metrics = rollout_metrics(collected.trajectories, engine.answers)
        metrics |= staleness(collected.trajectories, engine.step)
        with stop_on_non_finite(engine, collected):
            if collected.batch is not None:
                batch = estimate_advantages(collected.batch, config.algorithm.advantage, config.loss)
                metrics |= engine.update(batch, step)
        engine.step = step
        if step == steps:
            metrics |= engine.evaluate(step, config.eval.num_examples_final)
            if config.eval.search_off:
                metrics |= engine.evaluate(step, config.eval.num_examples_final, search_off=True)
        elif config.eval.every and step % config.eval.every == 0:
            metrics |= engine.evaluate(step, config.eval.num_examples)
        engine.save_trajectories(step, collected.trajectories)
        record(engine, log, metrics, collected)
        engine.lost_steps = engine.lost_steps + 1 if collected.batch is None else 0
        watch(engine, log, metrics)
        if engine.checkpoint_due:
            engine.save()
        stop_when_lost(engine, collected)


def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """Train from the beginning or from the newest checkpoint; returns the summary that it wrote.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the step in progress is finished and saved.
        UserError: the model, the data or the tools cannot be used, or training broke down; the message says where.
    """
    if config.hardware.threads:
        torch.set_num_threads(config.hardware.threads)
    point = resume_point(run_dir) if resume else None
    model = resolve_model(config, display)
    engine = LocalEngine(config, run_dir, display, model)
    run_dir.record("data", {"train": env_facts(engine.env), "eval": env_facts(engine.eval_env)})
    if config.model != TINY:  # the reference, the frozen half of LoRA and the tokenizer come from it again
        run_dir.record("model", fingerprint(model))
    if point:
        run_dir.remove_leftovers()
        cut_logs(run_dir, logs_at(point.path))
    engine.load(point.path if point else None)
    log = MetricsLog(run_dir, tensorboard=config.log.tensorboard, wandb=config.log.wandb)
    with closing(engine.env), closing(engine.eval_env), log:
        if point:
            tell_damage(engine, point)
        title = (
            f"{config.algo} on {engine.env.task.name}, {engine.num_parameters:,} parameters, {engine.device}"
        )
        display.start(title, config.update.steps, engine.step)
        with finish_step_on_interrupt(display) as interrupted:
            if not resume:
                record(engine, log, engine.evaluate(0, config.eval.num_examples_final))
                engine.save()  # so that a run killed in its first steps resumes too
            train(engine, log, interrupted)
        if engine.ended:
            display.message(engine.ended)
        elif interrupted.is_set() and engine.step < config.update.steps:
            engine.save()
            raise KeyboardInterrupt
    summary = engine.summarize()
    run_dir.write_summary(summary)
    return summary


def tell_damage(engine: LocalEngine, point: Whole) -> None:
    """Say which checkpoints were passed over for the one that the engine has just loaded, and set them aside."""
    for reason in point.passed_over:
        append_event(engine.run_dir, {"step": engine.step, "kind": "damaged_checkpoint", "reason": reason})
        engine.display.message(f"{reason}; going on from step {engine.step}")
    if point.damaged:
        set_aside(point.damaged)
        engine.save()  # with these events: a resume from the checkpoint as it was would cut them off again


def record(
    engine: LocalEngine, log: MetricsLog, metrics: dict[str, float], collected: Collected | None = None
) -> None:
    """Log a step's metrics, show them, and keep the policy if it is the best so far. The cards quote the log."""
    timings = engine.take_timings(collected.trajectories if collected else [])
    log.log(engine.step, metrics | timings)
    if engine.summary.observe(engine.step, metrics):
        engine.save_best()
    if "eval/success" in metrics or engine.is_saved(engine.step):
        write_trajectory_card(engine.run_dir, engine.config, engine.env.task)
    engine.display.step(engine.step, metrics | timings)


def watch(engine: LocalEngine, log: MetricsLog, metrics: dict[str, float]) -> None:
    """Look for a collapse, coming or come, and do about it what the config says."""
    alarm, action = engine.alarm.observe(engine.step, metrics), engine.config.alarm.action
    if alarm is not None:
        append_event(engine.run_dir, alarm.event(action))
        engine.display.message(f"collapse alarm in step {alarm.step}: {alarm.reason}")
        if action == "stop":
            engine.ended = f"ended by the collapse alarm after step {alarm.step} (alarm.action)"
        elif action == "roll_back":
            roll_back(engine, log, alarm)  # patience starts again, as the summary does
    if not engine.ended and 0 < engine.config.eval.patience <= engine.summary.evaluations_below:
        engine.ended = out_of_patience(engine.summary)


def roll_back(engine: LocalEngine, log: MetricsLog, alarm: Alarm) -> None:
    """Go on from the newest whole checkpoint before the signs of the alarm, at a lower rate: the same rate would come
    here again. The metrics of the steps that are taken back are kept in a file of their own.

    A run that is killed in here and resumed comes to the same alarm and does all of it again: the new rate, the cut
    metrics and the event count from ``engine.save`` on, which puts them on disk at once.
    """
    run_dir = engine.run_dir
    times = 1 + sum(event["kind"] == "roll_back" for event in read_jsonl(run_dir.events))
    kept = run_dir.path / f"rolled_back_{times}.jsonl"
    atomic_write(kept, run_dir.metrics.read_bytes())
    point = last_whole_before(run_dir, alarm.since)
    set_aside(point.damaged)
    drop_later(point.path)  # a resumed run would go on from them, and pruning would keep them instead
    log.cut_back(logs_at(point.path))
    engine.load(point.path)
    engine.lr_scale *= engine.config.alarm.roll_back_lr
    reasons = [
        *point.passed_over,
        f"the collapse alarm of step {alarm.step}; from here learning rates are times {engine.lr_scale:g}",
    ]
    event = {"step": engine.step, "kind": "roll_back", "from_step": alarm.step, "lr_scale": engine.lr_scale}
    append_event(run_dir, event | {"reason": "; ".join(reasons)})
    engine.save()
    engine.display.message(
        f"back to step {engine.step}, with learning rates times {engine.lr_scale:g}; the metrics of the steps taken "
        f"back are in {kept}" + "".join(f"; {reason}" for reason in point.passed_over)
    )


@contextmanager
def stop_on_non_finite(engine: LocalEngine, collected: Collected) -> Iterator[None]:
    """NaN or infinity ends the run with the trajectories on disk; the last good checkpoint stays as it is."""
    try:
        yield
    except NonFiniteError as error:
        path = engine.dump_non_finite(error, collected.trajectories)
        raise UserError(
            f"step {engine.step + 1}: {error}. The trajectories are in {path}; the last good checkpoint is "
            f"{list_checkpoints(engine.run_dir.checkpoints)[-1]}. Lower optim.lr, or look at these trajectories."
        ) from error


def stop_when_lost(engine: LocalEngine, collected: Collected) -> None:
    """End a run whose tools are out for good: it would only burn time."""
    if collected.batch is not None:
        return
    cause = next((t.error for t in collected.trajectories if t.error), "unknown")
    engine.display.message(
        f"step {engine.step}: every trajectory was excluded, nothing was trained on ({cause})"
    )
    if engine.lost_steps == MAX_LOST_STEPS:
        engine.lost_steps = 0  # a resume begins to count anew
        engine.save()
        raise UserError(
            f"every trajectory of {MAX_LOST_STEPS} steps in a row was excluded; the last error was: {cause}. "
            "Mend the tool or the task, then go on with --resume."
        )


@contextmanager
def finish_step_on_interrupt(display: Display) -> Iterator[threading.Event]:
    """The first Ctrl-C (or SIGTERM) lets the step in progress finish; a second one stops at once."""
    interrupted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        display.message("stopping after this step and its checkpoint; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield interrupted
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
