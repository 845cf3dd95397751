"""The figures of docs/stability.md, from the results files that are committed beside it.

python benchmarks/stability_figures.py          # writes docs/images/stability_*.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from sorl_train.study import interval, region

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
MAIN = ("ppo", "so_ppo", "grpo", "so_grpo")
REUSE = (
    "4, of 8",
    "4, 2 steps stale",
    "3, of 32",
    "6, of 16",
    "12, of 8",
)  # rows of the heat maps, from below
COLOURS = {"ppo": "#c0392b", "so_ppo": "#1f6f8b", "grpo": "#d98324", "so_grpo": "#3a7d44"}


def read(name: str) -> list[dict[str, Any]]:
    """The runs of a study that are committed."""
    path = DOCS / "stability" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heat_maps(grid: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], out: Path) -> None:
    """One panel an algorithm: learning rate by reuse; colour is final over peak, the number is final success.

    The share in a panel's title is of ``grid``, which all algorithms have in full; ``others`` are more rows.
    """
    runs = [*grid, *others]
    rates = sorted({run["optim.lr"] for run in runs})
    cells: dict[tuple[str, str, float], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        cells[run["arm"], _reuse(run), run["optim.lr"]].append(run)
    rows = [reuse for reuse in REUSE if any(reuse == key[1] for key in cells)]
    figure, axes = plt.subplots(
        1, len(MAIN), figsize=(12, 1.2 + 0.45 * len(rows)), sharey=True, layout="constrained"
    )
    for axis, arm in zip(axes, MAIN, strict=True):
        kept = np.full((len(rows), len(rates)), np.nan)  # NaN: not run, left white
        for (row, reuse), (column, rate) in itertools.product(enumerate(rows), enumerate(rates)):
            cell = cells.get((arm, reuse, rate))
            if cell:
                kept[row, column] = np.median([run["kept_mean"] for run in cell])
                final = float(np.median([run["final"] for run in cell]))
                colour = "white" if kept[row, column] < 0.45 else "black"
                axis.text(column, row, f"{final:.2f}", ha="center", va="center", color=colour, fontsize=9)
        image = axis.imshow(kept, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        share, low, high = region(_cells(grid, arm))
        axis.set_title(f"{arm}: {share:.0%} ({low:.0%} to {high:.0%})", fontsize=10)
        axis.set_xticks(range(len(rates)), [f"{rate:.1e}".replace("e-0", "e-") for rate in rates], fontsize=8)
        axis.set_yticks(range(len(rows)), rows, fontsize=9)
        axis.set_xlabel("learning rate", fontsize=9)
    axes[0].set_ylabel("optimizer steps a batch", fontsize=9)
    figure.colorbar(image, ax=axes, label="final / peak", shrink=0.9)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def _reuse(run: dict[str, Any]) -> str:
    """The row of a run: which study it is from says what it varied."""
    if "rollout.max_staleness" in run:
        return f"4, {run['rollout.max_staleness']} steps stale"
    if "update.mini_batch_size" in run:
        return f"{96 // run['update.mini_batch_size']}, of {run['update.mini_batch_size']}"
    return f"{4 * run['update.epochs']}, of 8"


def _cells(runs: Sequence[dict[str, Any]], arm: str) -> dict[str, list[float]]:
    cells: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run["arm"] == arm:
            cells[run["cell"]].append(run["kept_mean"])
    return cells


def curves(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Success over steps in the severe setting: the median over seeds, and each seed behind it."""
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for arm in MAIN:
        own = [dict(map(tuple, run["curve"])) for run in runs if run["arm"] == arm]
        last = max(step for curve in own for step in curve)
        filled = np.array(
            [[curve.get(step, list(curve.values())[-1]) for step in range(last + 1)] for curve in own]
        )
        for row in filled:
            axis.plot(row, color=COLOURS[arm], alpha=0.25, linewidth=1)
        axis.plot(
            np.median(filled, axis=0), color=COLOURS[arm], linewidth=2.5, label=f"{arm} ({len(own)} seeds)"
        )
    axis.set(xlabel="training step", ylabel="greedy success, held out", ylim=(0, 1.02))
    axis.legend(loc="lower left", fontsize=9)
    axis.grid(alpha=0.3)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def remedies(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """Final over peak of every arm in the severe setting, a dot a seed and the median with its interval."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    values = {arm: [run["kept_mean"] for run in runs if run["arm"] == arm] for arm in arms}
    arms.sort(key=lambda arm: float(np.median(values[arm])))
    figure, axis = plt.subplots(figsize=(7, 0.27 * len(arms) + 0.8), layout="constrained")
    for row, arm in enumerate(arms):
        median, low, high = interval(values[arm])
        axis.plot([low, high], [row, row], color="#888888", linewidth=3, solid_capstyle="round")
        axis.plot(values[arm], [row] * len(values[arm]), "o", color=COLOURS.get(arm, "#555555"), markersize=4)
        axis.plot([median], [row], "|", color="black", markersize=12, markeredgewidth=2)
    axis.set_yticks(range(len(arms)), arms, fontsize=8)
    axis.axvline(0.95, color="#1f6f8b", linestyle=":", linewidth=1)
    axis.set(xlabel="final / peak (means of three evaluations)", xlim=(-0.02, 1.05))
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DOCS / "images")
    out: Path = parser.parse_args(argv).out
    severe = read("severe")
    heat_maps(read("region"), [*read("mini_batch"), *read("staleness")], out / "stability_region.png")
    curves([run for run in severe if run["arm"] in MAIN], out / "stability_severe.png")
    remedies(severe, out / "stability_remedies.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
