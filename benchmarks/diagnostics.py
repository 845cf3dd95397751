"""What the diagnostics cost: a training step with all of them, next to the same step with none.

    python benchmarks/diagnostics.py --json diagnostics.json

Both sides train on the same collected batch with the quickstart's policy and settings; their rounds are interleaved in
one process. Off means that nothing is computed that the algorithm does not need: no entropy and no logit scale, no
ratio diagnostics, no token classes, no metrics of the batch or of the rollouts, no collapse alarm. The bar is 5% of a
step, rollouts included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_train.config.files import load_config
from sorl_train.engine import LocalEngine
from sorl_train.learner import scored_batch
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.diagnostics import RatioDiagnostics
from sorl_train.learner.scored_batch import estimate_advantages
from sorl_train.learner.update import PolicyUpdate
from sorl_train.losses.log_probs import TokenStats
from sorl_train.models.forward import action_stats
from sorl_train.rollout.metrics import rollout_metrics, staleness
from sorl_train.run.alarm import CollapseAlarm
from sorl_train.run.display import PlainDisplay
from sorl_train.run.folder import RunDir
from sorl_train.run.manifest import environment_facts
from sorl_train.sft.cold_start import resolve_model

BAR = 0.05  # of a step


class _NoDiagnostics(RatioDiagnostics):
    def metrics(self) -> dict[str, float]:
        return {}


class BareUpdate(PolicyUpdate):
    """The update and nothing else."""

    def _forward(self, micro: Batch) -> TokenStats:
        temperature = self.settings.temperature
        stats = action_stats(self.model, micro.token_ids, micro.loss_mask, temperature=temperature)
        return TokenStats(stats.log_probs, torch.zeros_like(stats.log_probs), None)

    def _diagnose(self, mini: Batch, log_probs: Tensor) -> RatioDiagnostics:
        nothing = torch.zeros(0)
        return _NoDiagnostics(nothing, nothing, nothing, (nothing, nothing, nothing))


def make_engine(algo: str, folder: Path, overrides: dict[str, Any]) -> LocalEngine:
    """The quickstart's engine, with its cold-started policy; no step's trajectories are saved."""
    group = {"rollout.group_size": 8} if algo.endswith("grpo") else {}
    config = load_config("quickstart", {"algo": algo, "rollout.save_every": 10**6} | group | overrides)
    torch.set_num_threads(config.hardware.threads)
    display = PlainDisplay(sys.stderr)
    engine = LocalEngine(config, RunDir.create(folder, config), display, resolve_model(config, display))
    engine.load(None)
    return engine


def with_diagnostics(engine: LocalEngine) -> Callable[[], None]:
    """A step as ``trainer.train`` takes it."""
    alarm = CollapseAlarm(engine.config.alarm)

    def step() -> None:
        collected = engine.collect(2)
        metrics = rollout_metrics(collected.trajectories, engine.answers) | staleness(
            collected.trajectories, 1
        )
        assert collected.batch is not None
        batch = estimate_advantages(collected.batch, engine.config.algorithm.advantage, engine.config.loss)
        metrics |= engine.update(batch, 2)
        alarm.observe(2, metrics)

    return step


def without_diagnostics(engine: LocalEngine) -> Callable[[], None]:
    """The same without what only a person reads."""
    engine.policy_update.__class__ = BareUpdate
    engine.collate = lambda trajectories: collate(trajectories, engine.tokenizer.pad_token_id)  # type: ignore[method-assign]

    def step() -> None:
        collected = engine.collect(2)
        assert collected.batch is not None
        engine.update(
            estimate_advantages(collected.batch, engine.config.algorithm.advantage, engine.config.loss), 2
        )

    return step


def measure(algo: str, rounds: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Medians of the seconds of a step and of the ratio of neighbours."""
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "on": with_diagnostics(make_engine(algo, Path(folder) / "on", overrides)),
            "off": without_diagnostics(make_engine(algo, Path(folder) / "off", overrides)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        batch_metrics = scored_batch.batch_metrics
        for number in range(rounds + 1):
            for name in ("on", "off") if number % 2 else ("off", "on"):
                _replace_batch_metrics(batch_metrics if name == "on" else lambda batch: {})
                started = time.perf_counter()
                steps[name]()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - started)
        _replace_batch_metrics(batch_metrics)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "algo": algo,
        "rounds": rounds,
        "seconds": medians,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _replace_batch_metrics(function: Callable[[Batch], dict[str, float]]) -> None:
    from sorl_train import engine

    engine.batch_metrics = function


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps of each algorithm")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override a setting")
    arguments = parser.parse_args(argv)
    overrides = dict(item.split("=", 1) for item in arguments.set)
    results = [
        measure(algo, arguments.rounds, {name: json.loads(value) for name, value in overrides.items()})
        for algo in ("so_ppo", "so_grpo")
    ]
    for result in results:
        on, off = result["seconds"]["on"], result["seconds"]["off"]
        verdict = "within" if result["ratio"] <= 1 + BAR else "ABOVE"
        print(
            f"{result['algo']:<8} {on:.3f} s a step with diagnostics, {off:.3f} s without: {result['ratio']:.3f} "
            f"(median of {result['rounds']}; {verdict} the bar of {1 + BAR:.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": results, **environment_facts()}, indent=2) + "\n")
    return 0 if all(result["ratio"] <= 1 + BAR for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
