"""Which divergence should a trust region limit? Some candidates from a weak start, where the policy has to move far.

    python benchmarks/trust_divergence.py --out runs/trust_divergence --seeds 2

Trains PPO at thirty times its right rate, once with each candidate in place of the mean squared log-ratio, and once at
the right rate without a trust region. The start is a policy after 200 supervised steps that is unsure of every token.
The limit is .01 for all, and nothing was tuned. docs/stability/trust_weak.jsonl holds the figures on docs/stability.md.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sorl_train import cli
from sorl_train.learner import update as update_module
from sorl_train.learner.batch import Batch
from sorl_train.learner.trust_region import MOST_MOVES, TrustRegion
from sorl_train.learner.update import PolicyUpdate
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import measure, success_curve

SETTINGS = ("--algo", "ppo", "--sft.steps", "200", "--eval.every", "2", "--eval.num_examples", "128")
SQUARE = "mean squared log-ratio"
# Of log-ratios to the policy that began the batch; the mean over tokens is the divergence.
CANDIDATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    SQUARE: lambda x: x.square() / 2,
    "KL of the old to the new policy (k3)": lambda x: x.exp() - 1 - x,
    "KL of the new to the old policy": lambda x: x.exp() * (x - 1) + 1,
}
DAMPED = f"{SQUARE}, Adam damped"
WITHOUT = "ppo 1.6e-4"


def mean_of(candidate: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Batch], float]:
    """The candidate in the form of ``token_kl``."""

    def divergence(log_probs: Tensor, batch: Batch) -> float:
        began = batch.old_log_probs if batch.start_log_probs is None else batch.start_log_probs
        if began is None:
            return 0.0
        mean = float(candidate((log_probs.cpu() - began.cpu())[batch.loss_mask.cpu()].double()).mean())
        return mean if math.isfinite(mean) else math.inf

    return divergence


def damp_moments() -> None:
    """When weights go back by a share, let Adam's first moment shrink by it, too."""
    begin_batch, go_back = PolicyUpdate.begin_batch, TrustRegion.go_back
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def begin(update: PolicyUpdate) -> None:
        optimizers[id(update.trust)] = update.optimizer
        begin_batch(update)

    def back(trust: TrustRegion, weights: list[Tensor], kl: float, move: int) -> None:
        go_back(trust, weights, kl, move)
        share = math.sqrt(trust.target / kl) if move < MOST_MOVES else 0.0
        for state in optimizers[id(trust)].state.values():
            state["exp_avg"].mul_(share)

    PolicyUpdate.begin_batch = begin  # type: ignore[method-assign]
    TrustRegion.go_back = back  # type: ignore[method-assign, assignment]


def folder_of(out: Path, arm: str, seed: int) -> Path:
    return out / f"{arm}-s{seed}".replace(", ", "-").replace(" ", "_")


def run(job: tuple[str, int, Path]) -> None:
    """Train one arm, unless that is done."""
    arm, seed, out = job
    folder = folder_of(out, arm, seed)
    if RunDir(folder).summary.is_file():
        return
    trust = ["--optim.lr", "4.8e-3", "--update.trust_kl", "0.01"]
    if arm == DAMPED:
        damp_moments()
    elif arm != WITHOUT:
        update_module.token_kl = mean_of(CANDIDATES[arm])
    flags = ["--optim.lr", "1.6e-4"] if arm == WITHOUT else trust
    # what a candidate says of a run that has begun is not kept, so it begins again
    where = ["--config", "off_policy", "--run_dir", str(folder), "--seed", str(seed), "--overwrite"]
    status = cli.main([*where, *SETTINGS, *flags])
    print(f"{arm}, seed {seed}: exit status {status}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/trust_divergence"), help="folder of runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to, a line a run")
    args = parser.parse_args()
    arms = (WITHOUT, *CANDIDATES, DAMPED)
    todo = [(arm, seed, args.out) for seed in range(args.seeds) for arm in arms]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for done, _ in enumerate(pool.imap_unordered(run, todo), 1):
            print(f"{done} of {len(todo)} runs", file=sys.stderr)
    lines = []
    for arm, seed, out in todo:
        found = measure(folder_of(out, arm, seed))
        figures = {key: value if math.isfinite(value) else None for key, value in found.items()}
        curve = success_curve(folder_of(out, arm, seed))
        lines.append(json.dumps({"cell": arm, "arm": arm, "seed": seed, **figures, "curve": curve}) + "\n")
        print(arm, seed, figures["final"])
    if args.json:
        atomic_write(args.json, "".join(lines))


if __name__ == "__main__":
    main()
