"""The time of a training step of each algorithm, for the table of docs/algorithms.md.

    python benchmarks/algorithm_seconds.py --json docs/stability/algorithms_seconds.json

A step is that of the study ``algorithms``: 32 rollouts on MiniHop, scoring, and four optimizer steps, from the same
cold start, at a learning rate so small that all policies stay the same. All arms take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from train_step import machine

from sorl_train.config.files import with_overrides
from sorl_train.engine import LocalEngine
from sorl_train.lab.study import load_study
from sorl_train.learner.correction import correct
from sorl_train.learner.overlong import with_loss_tokens
from sorl_train.learner.scored_batch import estimate_advantages
from sorl_train.run.display import PlainDisplay
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import resolve_model

RATE = 1e-9


def make_engines(folder: Path) -> dict[str, LocalEngine]:
    """An engine for each arm of the study."""
    engines = {}
    for run in load_study("algorithms").runs:
        if run.arm not in engines:
            config = with_overrides(run.config, {"optim.lr": RATE, "optim.critic_lr": RATE})
            torch.set_num_threads(config.hardware.threads)
            display = PlainDisplay(sys.stderr)
            name = f"arm{len(engines)}"
            made = RunDir.create(folder / name, config)
            engines[run.arm] = LocalEngine(config, made, display, resolve_model(config, display))
            engines[run.arm].load(None)
    return engines


def step_seconds(engine: LocalEngine, step: int) -> float:
    """The seconds of one step as ``train_rl.train`` takes it, without evaluation and logs."""
    started = time.perf_counter()
    collected = engine.collect(step)
    assert collected.batch is not None
    batch = estimate_advantages(collected.batch, engine.config.algorithm.advantage, engine.config.loss)
    batch, _ = correct(with_loss_tokens(batch), engine.config)
    engine.update(batch, step)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="steps of each arm (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engines = make_engines(Path(folder))
        seconds: dict[str, list[float]] = {arm: [] for arm in engines}
        for number in range(arguments.rounds + 1):  # the first round warms up
            for arm, engine in engines.items():
                # all arms of a round answer the same questions
                taken = step_seconds(engine, number + 1)
                if number:
                    seconds[arm].append(taken)
    medians = {arm: statistics.median(found) for arm, found in seconds.items()}
    for arm, median in medians.items():
        print(f"{arm:22} {median:7.3f} s  {median / min(medians.values()):5.2f}")
    if arguments.json:
        figures = {"machine": machine(), "rounds": arguments.rounds, "median_step_s": medians}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
