"""The figures of docs/stability.md, from the results files that are committed beside it.

python benchmarks/stability_figures.py          # writes docs/images/stability_*.png
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from stability_runs import (
    DOCS,
    MAIN,
    RATES,
    REUSE,
    TRUST,
    Run,
    cells_of,
    larger_mini_batch,
    read,
    share_above,
    whole_grid,
)

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"ppo": "#c0392b", "so_ppo": "#1f6f8b", "grpo": "#d98324", "so_grpo": "#3a7d44"}


def heat_maps(runs: Sequence[Run], out: Path) -> None:
    """One panel an algorithm: learning rate by reuse; colour is final over peak, the number is final success."""
    shown = [run for run in runs if run["optim.lr"] in RATES]
    figure, axes = plt.subplots(1, len(MAIN), figsize=(12, 3.4), sharey=True, layout="constrained")
    for axis, arm in zip(axes, MAIN, strict=True):
        cells, final = cells_of(shown, arm, "kept_mean"), cells_of(shown, arm, "final")
        kept = np.full((len(REUSE), len(RATES)), np.nan)  # NaN: not run, left white
        for (row, reuse), (column, rate) in itertools.product(enumerate(REUSE), enumerate(RATES)):
            if (reuse, rate) in cells:
                kept[row, column] = np.median(cells[reuse, rate])
                colour = "white" if kept[row, column] < 0.45 else "black"
                number = f"{np.median(final[reuse, rate]):.2f}"
                axis.text(column, row, number, ha="center", va="center", color=colour, fontsize=9)
        image = axis.imshow(kept, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        share, low, high = share_above(0.95, cells_of(shown, arm, "held"))
        axis.set_title(f"{arm}: {share:.0%} ({low:.0%} to {high:.0%})", fontsize=10)
        axis.set_xticks(range(len(RATES)), [f"{rate:.1e}".replace("e-0", "e-") for rate in RATES], fontsize=8)
        axis.set_yticks(range(len(REUSE)), REUSE, fontsize=9)
        axis.set_xlabel("learning rate", fontsize=9)
    axes[0].set_ylabel("optimizer steps a batch", fontsize=9)
    figure.colorbar(image, ax=axes, label="final / peak", shrink=0.9)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def curves(settings: Mapping[str, Sequence[Run]], out: Path) -> None:
    """Success over steps in severe settings, one panel each: the median over seeds, and each seed behind it.

    A run that was ended early counts on as it was last.
    """
    figure, axes = plt.subplots(1, len(settings), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, (title, runs) in zip(axes, settings.items(), strict=True):
        for arm in MAIN:
            own = [dict(map(tuple, run["curve"])) for run in runs if run["arm"] == arm]
            last = max(step for curve in own for step in curve)
            filled = np.array(
                [[curve.get(step, list(curve.values())[-1]) for step in range(last + 1)] for curve in own]
            )
            for row in filled:
                axis.plot(row, color=COLOURS[arm], alpha=0.25, linewidth=1)
            label = f"{arm} ({len(own)} seeds)"
            axis.plot(np.median(filled, axis=0), color=COLOURS[arm], linewidth=2.5, label=label)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel="training step", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("greedy success, held out")
    axes[0].legend(loc="lower left", fontsize=9)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def remedies(runs: Sequence[Run], out: Path) -> None:
    """Final over peak of every arm in the severe setting, a dot a seed, their range and median."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    values = {arm: [run["kept_mean"] for run in runs if run["arm"] == arm] for arm in arms}
    arms.sort(key=lambda arm: float(np.median(values[arm])))
    figure, axis = plt.subplots(figsize=(7, 0.27 * len(arms) + 0.8), layout="constrained")
    for row, arm in enumerate(arms):
        axis.hlines(row, min(values[arm]), max(values[arm]), color="#888888", linewidth=3, capstyle="round")
        axis.plot(values[arm], [row] * len(values[arm]), "o", color=COLOURS.get(arm, "#555555"), markersize=4)
        axis.plot([np.median(values[arm])], [row], "|", color="black", markersize=12, markeredgewidth=2)
    axis.set_yticks(range(len(arms)), arms, fontsize=8)
    axis.axvline(0.95, color="#1f6f8b", linestyle=":", linewidth=1)
    axis.set(xlabel="final / peak (means of three evaluations)", xlim=(-0.02, 1.05))
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def by_rate(runs: Sequence[Run], out: Path) -> None:
    """Final success by learning rate, with and without a trust region: mean and range over the kinds of reuse."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True, layout="constrained")
    for axis, algo in zip(axes, ("ppo", "grpo"), strict=True):
        arms = {algo: "#c0392b", f"so_{algo}": "#1f6f8b", algo + TRUST: "#3a7d44"}
        for arm, colour in arms.items():
            final = cells_of(runs, arm, "final")
            medians = np.array([[np.median(final[reuse, rate]) for rate in RATES] for reuse in REUSE])
            axis.plot(RATES, medians.mean(axis=0), "o-", color=colour, label=arm)
            axis.fill_between(
                RATES, medians.min(axis=0), medians.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
        axis.set(xscale="log", xlabel="learning rate", ylim=(-0.02, 1.02))
        axis.set_xticks(RATES, [f"{rate:.1e}".replace("e-0", "e-") for rate in RATES], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9, loc="lower left")
    axes[0].set_ylabel("success after training")
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DOCS / "images")
    out: Path = parser.parse_args(argv).out
    severe = read("severe")
    heat_maps(
        [run for study in ("region", "mini_batch", "staleness") for run in read(study)],
        out / "stability_region.png",
    )
    by_rate(whole_grid(), out / "stability_trust_region.png")
    settings = {
        "12 optimizer steps of 8 trajectories on each batch, rate 5e-4": severe,
        "3 of 32, rate 1.6e-3": larger_mini_batch(),
    }
    curves(settings, out / "stability_severe.png")
    remedies(severe, out / "stability_remedies.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
