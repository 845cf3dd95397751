"""Reinforcement learning on one machine. ``train`` is the algorithm: PPO, GRPO and the paper's variants of them.

Training is off-policy for two reasons: a rollout batch is reused (several mini-batches and epochs), and with
``rollout.max_staleness`` it is trained on some steps after it was sampled. With ``replay.size`` past trajectories join
it. The old log-probability in a ratio is the trainer's own, computed when a trajectory is collected, not the sampler's.
"""

from __future__ import annotations

import dataclasses
import shlex
import threading
from contextlib import closing
from typing import Any

import torch

from sorl_env.task.registry import load_task
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.engine import LocalEngine, stop_on_non_finite
from sorl_train.evaluate.find_policy import fingerprint
from sorl_train.learner.advantages import prepare
from sorl_train.learner.dapo import dynamic_metrics, overlong_metrics
from sorl_train.learner.replay import replay_metrics
from sorl_train.rollout.environments import record_facts, record_sources
from sorl_train.rollout.metrics import rollout_metrics, staleness, tool_timings
from sorl_train.run.checkpoint import resume_point, rewind, tell_state
from sorl_train.run.display import Display, finish_step_on_interrupt, saved_on_error
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import next_moves
from sorl_train.sft.cold_start import resolve_model


def train(engine: LocalEngine, interrupted: threading.Event) -> None:
    """The algorithm (Alg. 1 and 2 of the paper): sample, score, estimate advantages, update; then log and save."""
    config, recorder, steps = engine.config, engine.recorder, engine.config.update.steps
    while engine.step < steps and not interrupted.is_set() and not recorder.ended:
        step = engine.step + 1
        with saved_on_error(engine.save, recorder.display):
            while len(engine.waiting) <= config.rollout.max_staleness and step + len(engine.waiting) <= steps:
                engine.waiting.append(engine.collect(step + len(engine.waiting)))
        collected = engine.waiting.popleft()
        trajectories = collected.trajectories
        metrics = rollout_metrics(trajectories, engine.answers) | staleness(trajectories, engine.step)
        metrics |= overlong_metrics(trajectories, engine.token_limit, config.overlong)
        metrics |= dynamic_metrics(trajectories, collected.batch, config.rollout)
        mixed = engine.mix(collected)
        metrics |= replay_metrics(mixed, engine.replay)
        if mixed.batch is not None and bool(mixed.batch.loss_mask.any()):
            with stop_on_non_finite(recorder, step, [*trajectories, *mixed.replayed]):
                batch, prepared = prepare(mixed.batch, config)
                metrics |= prepared | engine.update(batch, step)
        engine.step = step
        metrics |= recorder.evaluate_if_due(step, engine.evaluate)
        engine.save_trajectories(step, trajectories)
        if recorder.record(step, metrics | tool_timings(trajectories), trajectories):
            engine.save_best()
        recorder.check_health(step, metrics, trajectories)
        if recorder.checkpoint_due(step):
            engine.save()
        recorder.stop_if_lost()


def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """Train from the beginning or from the newest checkpoint; returns the summary, which it also writes.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the step in progress is finished and saved.
        UserError: the model, the data or the tools cannot be used, or training broke down; the message says where.
    """
    if config.hardware.threads:
        torch.set_num_threads(config.hardware.threads)
    point = resume_point(run_dir) if resume else None
    if point:  # before a cold start is trained on them
        record_sources(config, run_dir, load_task(config.task, **config.task_args))
    begun = dataclasses.replace(config, limits=run_dir.begun_limits(config.limits))
    model = resolve_model(begun, display)
    engine = LocalEngine(config, run_dir, display, model)
    record_facts(config, run_dir, engine.env, engine.eval_env)
    # a resume loads the reference, LoRA's frozen weights and the tokenizer from it again
    if config.model != TINY:
        run_dir.record("model", fingerprint(model))
    if config.loss.kl_coef and config.loss.kl_model:
        run_dir.record("teacher", fingerprint(config.loss.kl_model))
    if point:
        run_dir.begin_resume()
        rewind(run_dir, point.path)
    engine.load(point.path if point else None)
    with closing(engine.env), closing(engine.eval_env), closing(engine.recorder):
        if point:
            tell_state(run_dir, display.message, point)
            if point.damaged:
                engine.save()  # with these events, which another resume from this checkpoint would cut off otherwise
        title = (
            f"{config.algo} on {engine.env.task.name}, {engine.num_parameters:,} parameters, {engine.device}"
        )
        display.start(title, config.update.steps, engine.step)
        with finish_step_on_interrupt(display) as interrupted:
            if not resume:
                evaluated = engine.evaluate(config.eval.num_examples_final)
                if engine.recorder.record(0, evaluated):
                    engine.save_best()
                if evaluated.get("eval/success") == 0:
                    ask = shlex.join(["sorl-ask", "--model", str(run_dir.path), "--index", "0"])
                    display.message(
                        f"the policy begins with success 0; see what it writes, and where it fails: {ask}"
                    )
                engine.save()  # so that a run that is killed in its first steps can be resumed too
            train(engine, interrupted)
        if interrupted.is_set() and engine.step < config.update.steps and not engine.recorder.ended:
            engine.save()
            raise KeyboardInterrupt
    is_sample = engine.env.examples.is_sample or engine.eval_env.examples.is_sample
    facts = {"steps": engine.step, "parameters": engine.num_parameters, "is_sample": is_sample}
    summary = engine.recorder.finish(facts)
    if engine.recorder.ended:
        moves = next_moves(config.optim.lr, config.update.trust_kl, run_dir, summary["best_step"])
        display.message(f"{engine.recorder.ended}. {moves}")
    return summary
