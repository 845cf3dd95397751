"""``--stage sft``: supervised fine-tuning on demonstrations, with an evaluation before and after."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import torch

from sorl_train.config.settings import TrainConfig
from sorl_train.engine import LocalEngine
from sorl_train.rollout.environments import env_facts
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import resolve_model
from sorl_train.sft.fine_tune import fine_tune, load_demos


def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """Fine-tune the model, write ``checkpoints/best/policy``, and evaluate before and after; returns the summary."""
    assert not resume, "the command refuses it"
    if config.hardware.threads:
        torch.set_num_threads(config.hardware.threads)
    engine = LocalEngine(config, run_dir, display, resolve_model(config, display))
    env, recorder = engine.env, engine.recorder
    demos = load_demos(config.sft, env, engine.tokenizer, use_chat_template=config.chat_template)
    run_dir.record("data", {"train": env_facts(env), "demos": len(demos)})
    started = time.monotonic()
    engine.load(None)

    def evaluate(step: int) -> None:
        engine.step = step
        recorder.log(step, engine.evaluate(config.eval.num_examples_final))

    def on_step(step: int, metrics: dict[str, float]) -> None:
        recorder.log(step, metrics | {"time/elapsed_s": time.monotonic() - started})

    with closing(recorder):
        display.start(f"sft on {env.task.name}, {engine.num_parameters:,} parameters", config.sft.steps)
        evaluate(0)
        pad_id, dtype = engine.tokenizer.pad_token_id, config.hardware.dtype
        fine_tune(engine.policy, demos, config.sft, pad_id, on_step, seed=config.seed, dtype=dtype)
        evaluate(config.sft.steps)
    engine.save_best()
    return recorder.finish({"demos": len(demos)})
