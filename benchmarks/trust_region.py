"""What a trust region adds to an update in which nothing is taken back: time and memory.

    python benchmarks/trust_region.py --json docs/stability/trust_region_cost.json

An update with it should take at most 1.10 of the time of one without it. The last look is at a quarter of the batch, so
its share is largest with one epoch, where each trajectory is trained on once. Both sides take turns in one process, and
ratios are medians over rounds. What the trust region holds beside the update is one copy of the trained weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from diagnostics import make_engine
from losses import Step, language_model, measure, show

from sorl_train.learner.batch import Batch
from sorl_train.learner.means import Means
from sorl_train.learner.scored_batch import estimate_advantages
from sorl_train.learner.trust_region import final_kl_sample
from sorl_train.learner.update import PolicyUpdate

NEVER = 1e9  # a limit that is always kept
SIDES = {"without": None, "with a trust region": NEVER}
EPOCHS = (1, 3)


def quickstart(folder: Path, epochs: int) -> dict[str, Step]:
    """The update stage of ``configs/off_policy.yaml``: 32 trajectories, mini-batches of 8; policy and critic."""
    steps: dict[str, Step] = {}
    for name, limit in SIDES.items():
        changes = {"rollout.batch_size": 32, "update.mini_batch_size": 8, "update.epochs": epochs}
        engine = make_engine("ppo", folder / name, {**changes, "update.trust_kl": limit, "optim.lr": 1e-9})
        batch = engine.collect(2).batch
        assert batch is not None
        scored = estimate_advantages(batch, engine.config.algorithm.advantage, engine.config.loss)
        steps[name] = lambda engine=engine, scored=scored: engine.update(scored, 2)
    return steps


def smollm2(layers: int, epochs: int) -> dict[str, Step]:
    """Updates on 8 trajectories of 250 tokens, 4 mini-batches of 2, of a model with the sizes of SmolLM2-135M."""
    steps: dict[str, Step] = {}
    for name, limit in SIDES.items():
        update, batch = language_model(
            8, 250, layers, {"update.micro_batch_size": 2, "update.trust_kl": limit}
        )

        def step(update: PolicyUpdate = update, batch: Batch = batch) -> None:
            means = Means()
            update.begin_batch()
            for first in list(range(0, 8, 2)) * epochs:
                update.step(batch.rows([first, first + 1]), 1e-9, means)
            update.end_batch(batch.rows(final_kl_sample(batch.loss_mask)), means)

        steps[name] = step
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="of the language model (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    figures: dict[str, Any] = {"settings": {**vars(args), "json": None, "torch": torch.__version__}}
    for epochs in EPOCHS:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(quickstart(Path(folder), epochs), args.rounds, memory=False)
        figures[f"off_policy_{epochs}_epochs"] = results
        show(f"update stage of the off-policy quickstart, {epochs} epochs (at most 1.10)", results)
    torch.set_num_threads(2)
    for epochs in EPOCHS:
        results = measure(smollm2(args.layers, epochs), max(args.rounds // 4, 3), memory=False)
        figures[f"language_model_{epochs}_epochs"] = results
        show(f"updates of a language model, 2,000 tokens, {epochs} epochs (at most 1.10)", results)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
