"""``--stage sft``: supervised fine-tuning on demonstrations, evaluated before and after."""

from __future__ import annotations

import time
from typing import Any

import torch

from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import load_tokenizer
from sorl_train.rollout.environments import env_facts, make_env
from sorl_train.run.cards.trajectories import write_trajectory_card
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import MetricsLog
from sorl_train.run.summary import Summary
from sorl_train.sft.cold_start import resolve_model
from sorl_train.sft.fine_tune import fine_tune, load_demos


def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """``--stage sft``: fine-tune the model, write ``checkpoints/best/policy``, and evaluate before and after."""
    from sorl_train.engine import (
        LocalEngine,
    )  # the engine evaluates; its module imports this package

    if resume:
        raise UserError(
            "a supervised run is short and does not resume: start it again with another --run_dir"
        )
    if config.hardware.threads:
        torch.set_num_threads(config.hardware.threads)
    folder = resolve_model(config, display)
    env = make_env(config)
    tokenizer = load_tokenizer(folder)
    demos = load_demos(config, env, tokenizer)
    run_dir.record("data", {"train": env_facts(env), "demos": len(demos)})
    summary, started = Summary(), time.monotonic()
    engine = LocalEngine(config, run_dir, display, folder)
    engine.load(None)
    with MetricsLog(run_dir, tensorboard=config.log.tensorboard, wandb=config.log.wandb) as log:
        display.start(f"sft on {env.task.name}, {engine.num_parameters:,} parameters", config.sft.steps)

        def evaluate(step: int) -> None:
            metrics = engine.evaluate(step, config.eval.num_examples_final)
            summary.observe(step, metrics)
            log.log(step, metrics)
            display.step(step, metrics)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            log.log(step, metrics | {"time/elapsed_s": time.monotonic() - started})
            display.step(step, metrics)

        evaluate(0)
        fine_tune(engine.policy, demos, config, tokenizer.pad_token_id, on_step)
        evaluate(config.sft.steps)

    engine.save_best()
    write_trajectory_card(run_dir, config, env.task)
    figures = {
        "stage": "sft",
        "task": env.task.name,
        "seed": config.seed,
        "demos": len(demos),
    } | summary.figures()
    run_dir.write_summary(figures)
    return figures
