"""Norms of the clipping bias on real batches: what they grow with, what they say about the gradient, what Adam leaves.

    python benchmarks/clip_bias_norms.py --json clip_bias_norms.json

The quickstart's policy samples 256 trajectories, takes a few PPO steps on them, and is then off-policy. On mini-batches
of 16, 64 and 256 of them each norm is computed, and the L2 norm of the parameter gradient of the clipped part, which
they stand for. Then the same on turns with longer reasoning. Last, the same 24 mini-batches are trained on from the
same start without normalization and with each of its targets, and the lengths of all steps are added up: for plain SGD
the targets are one; Adam divides a scale out again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sorl_train.config.files import load_config
from sorl_train.config.seeds import generator
from sorl_train.engine import LocalEngine
from sorl_train.learner.batch import Batch
from sorl_train.learner.means import Means
from sorl_train.learner.scored_batch import estimate_advantages
from sorl_train.learner.settings import update_settings
from sorl_train.learner.update import PolicyUpdate
from sorl_train.losses.aggregate import loss_denominator
from sorl_train.losses.policy import LossSettings, policy_loss
from sorl_train.run.display import PlainDisplay
from sorl_train.run.folder import RunDir
from sorl_train.run.manifest import environment_facts
from sorl_train.sft.cold_start import resolve_model

BATCH = 256
SIZES = (16, 64, 256)
NAMES = ("scalar", "trajectory", "token", "token_mean", "rms", "logit")
LEVELS = {"token": "ppo", "turn": "turn_ppo"}


def make_engine(folder: Path, **overrides: Any) -> LocalEngine:
    """The quickstart's engine for a batch of 256 and 24 mini-batches of it."""
    settings: dict[str, Any] = {
        "algo": "ppo",
        "rollout.batch_size": BATCH,
        "update.mini_batch_size": 32,
        "update.epochs": 3,
        "optim.lr": 1e-3,
        "optim.max_grad_norm": None,
    }
    config = load_config("quickstart", settings | overrides)
    torch.set_num_threads(config.hardware.threads)
    display = PlainDisplay(sys.stderr)
    engine = LocalEngine(config, RunDir.create(folder, config), display, resolve_model(config, display))
    engine.load(None)
    return engine


def collect(engine: LocalEngine) -> Batch:
    """Trajectories with advantages from a critic that has been trained on a batch before."""
    assert engine.critic_update is not None
    for step in (1, 2):
        batch = engine.collect(step).batch
        assert batch is not None
        batch = estimate_advantages(batch, engine.config.algorithm.advantage, engine.config.loss)
        if step == 1:
            for _ in range(20):
                engine.critic_update.step(batch, 1e-3, Means())
    return batch


def drift(engine: LocalEngine, batch: Batch, steps: int) -> None:
    """PPO steps that take the policy away from the one that sampled the batch."""
    order = generator(0, "drift").permutation(len(batch))
    for start in range(steps):
        engine.policy_update.step(batch.rows(order[start * 32 : start * 32 + 32].tolist()), 1e-3, Means())


def norms(engine: LocalEngine, mini: Batch, level: Any) -> dict[str, float]:
    """All norms of a mini-batch, of the gradient of its clipped part, and of its whole gradient."""
    stats = engine.policy_update._forward(mini)
    assert mini.old_log_probs is not None and mini.advantages is not None
    output = policy_loss(
        stats.log_probs,
        mini.old_log_probs,
        mini.advantages,
        mini.loss_mask,
        mini.turn_ids,
        LossSettings(level, clip_bias_objective=True),
        denominator=loss_denominator(mini.loss_mask),
        logit_scale=stats.logit_scale,
    )
    parameters = engine.policy_update.parameters

    def gradient_norm(scalar: Any) -> float:
        if scalar is None:
            return 0.0
        grads = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
        return float(torch.stack([g.norm() for g in grads if g is not None]).norm())

    found = {name: output.clip_bias.norm(name) for name in NAMES}  # type: ignore[arg-type]
    found["gradient"] = gradient_norm(output.clip_bias_objective)
    found["whole gradient"] = gradient_norm(output.loss)
    found["clip_frac"] = output.stats.metrics()["clip_frac"]
    found["tokens"] = float(mini.loss_mask.sum())
    return found


def growth(engine: LocalEngine, batch: Batch, level: str) -> dict[str, Any]:
    """Medians of every norm by size of the mini-batch, and rank correlations with the true gradient's at size 16."""
    draws: dict[int, list[dict[str, float]]] = {}
    for size in SIZES:
        order = generator(0, "sizes", size).permutation(len(batch))
        starts = range(0, len(batch), size)
        draws[size] = [norms(engine, batch.rows(order[s : s + size].tolist()), level) for s in starts]
    medians = {
        size: {name: statistics.median(draw[name] for draw in rows) for name in rows[0]}
        for size, rows in draws.items()
    }
    true = [draw["gradient"] for draw in draws[SIZES[0]]]
    correlation = {name: _rank_correlation([d[name] for d in draws[SIZES[0]]], true) for name in NAMES}
    return {"medians": medians, "rank_correlation": correlation}


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def adam(engine: LocalEngine, batch: Batch, delta: float) -> dict[str, Any]:
    """Path length of 24 steps, and the mean factor, without normalization and with each target."""
    start = [p.detach().clone() for p in engine.policy_update.parameters]
    found = {}
    for optimizer in ("adam", "sgd"):
        for target in ("none", "gradient", "update"):
            for parameter, value in zip(engine.policy_update.parameters, start, strict=True):
                parameter.data.copy_(value)
            algo = "turn_ppo" if target == "none" else "so_ppo"
            loss = {"clip_bias_norm": "rms", "clip_bias_delta": delta}
            if target != "none":
                loss["clip_bias_target"] = target
            config = load_config(
                "quickstart",
                {"algo": algo, "optim.max_grad_norm": None},
                shared={f"loss.{k}": v for k, v in loss.items()},
            )
            kind = torch.optim.AdamW if optimizer == "adam" else torch.optim.SGD
            rate = 1e-3 if optimizer == "adam" else 0.3
            stepper = kind(engine.policy_update.parameters, lr=rate, weight_decay=0.0)
            update = PolicyUpdate(engine.policy, stepper, update_settings(config))
            means, length = Means(), 0.0
            for epoch in range(3):
                order = generator(0, "adam", epoch).permutation(len(batch))
                for first in range(0, len(batch), 32):
                    before = [p.detach().clone() for p in update.parameters]
                    update.step(batch.rows(order[first : first + 32].tolist()), rate, means)
                    pairs = zip(update.parameters, before, strict=True)
                    length += float(torch.stack([(p.detach() - b).norm() for p, b in pairs]).norm())
            result = means.result()
            found[f"{optimizer}, {target}"] = {
                "path_length": length,
                "mean_factor": result["loss/normalizer"],
                "normalized_frac": result["loss/normalized_frac"],
            }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="PPO steps before the norms are taken")
    parser.add_argument(
        "--reasoning", type=int, default=3, help="of the longer turns; see the task's argument"
    )
    parser.add_argument("--delta", type=float, default=0.003, help="of the rms norm, for the last comparison")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = {"growth": {}}
    with tempfile.TemporaryDirectory() as folder:
        for reasoning in (1, arguments.reasoning):
            # without the argument the quickstart's own cold start is taken from the cache
            longer = {"reasoning": reasoning} if reasoning > 1 else {}
            engine = make_engine(Path(folder) / str(reasoning), task_args={"hasty": 0.75} | longer)
            batch = collect(engine)
            if reasoning == 1:
                results["adam"] = adam(engine, batch, arguments.delta)
                engine.load(None)
            drift(engine, batch, arguments.steps)
            results["growth"][f"reasoning {reasoning}"] = {
                level: growth(engine, batch, level) for level in LEVELS
            }
    _show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results | environment_facts(), indent=2) + "\n")
    return 0


def _show(results: dict[str, Any]) -> None:
    for setting, levels in results["growth"].items():
        for level, found in levels.items():
            print(f"\n{setting}, ratio of the {level}; medians by size of the mini-batch")
            print(f"  {'':<16}" + "".join(f"{size:>10}" for size in SIZES) + "   rank correlation")
            for name in (*NAMES, "gradient", "whole gradient", "clip_frac", "tokens"):
                row = "".join(f"{found['medians'][size][name]:>10.4g}" for size in SIZES)
                rho = found["rank_correlation"].get(name)
                print(f"  {name:<16}{row}" + (f"{rho:>12.2f}" if rho is not None else ""))
    print("\n24 steps, lengths added up, as a share of those without normalization")
    for name, found in results["adam"].items():
        base = results["adam"][f"{name.split(',')[0]}, none"]["path_length"]
        print(f"  {name:<16}{found['path_length'] / base:>8.3f}   mean factor {found['mean_factor']:.3f}")


if __name__ == "__main__":
    sys.exit(main())
