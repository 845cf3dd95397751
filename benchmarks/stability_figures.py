"""The figures of docs/stability.md, from the results files that are committed beside it.

python benchmarks/stability_figures.py          # writes docs/images/stability_*.png
"""

from __future__ import annotations

import argparse
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
COLOURS = {"ppo": "#c0392b", "so_ppo": "#1f6f8b", "grpo": "#d98324", "so_grpo": "#3a7d44"}


def read(name: str) -> list[dict[str, Any]]:
    """The runs of a study."""
    path = DOCS / "stability" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def heat_maps(runs: Sequence[dict[str, Any]], out: Path) -> None:
    """One panel an algorithm: learning rate by reuse; colour is final over peak, the number is final success."""
    rates = sorted({run["optim.lr"] for run in runs})
    epochs = sorted({run["update.epochs"] for run in runs})
    figure, axes = plt.subplots(1, len(MAIN), figsize=(12, 2.2), sharey=True, layout="constrained")
    for axis, arm in zip(axes, MAIN, strict=True):
        kept = np.full((len(epochs), len(rates)), np.nan)
        for row, epoch in enumerate(epochs):
            for column, rate in enumerate(rates):
                cell = [
                    r for r in runs if (r["arm"], r["optim.lr"], r["update.epochs"]) == (arm, rate, epoch)
                ]
                if cell:
                    kept[row, column] = np.median([run["kept_mean"] for run in cell])
                    final = float(np.median([run["final"] for run in cell]))
                    dark = kept[row, column] < 0.45
                    axis.text(
                        column,
                        row,
                        f"{final:.2f}",
                        ha="center",
                        va="center",
                        color="white" if dark else "black",
                    )
        image = axis.imshow(kept, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        share, low, high = region(_cells(runs, arm))
        axis.set_title(f"{arm}: {share:.0%} of the grid ({low:.0%} to {high:.0%})", fontsize=10)
        axis.set_xticks(range(len(rates)), [f"{rate:.1e}".replace("e-0", "e-") for rate in rates], fontsize=8)
        axis.set_yticks(range(len(epochs)), [str(epoch) for epoch in epochs])
        axis.set_xlabel("learning rate", fontsize=9)
    axes[0].set_ylabel("epochs a batch", fontsize=9)
    figure.colorbar(image, ax=axes, label="final / peak", shrink=0.9)
    figure.savefig(out, dpi=130)
    plt.close(figure)


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
    heat_maps(read("region"), out / "stability_region.png")
    curves([run for run in severe if run["arm"] in MAIN], out / "stability_severe.png")
    remedies(severe, out / "stability_remedies.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
