"""The runs behind docs/stability.md, and what the page says of the grid of learning rates and reuse."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sorl_train.evaluate.intervals import mean_interval
from sorl_train.run.stability import learned

DOCS = Path(__file__).resolve().parents[1] / "docs"
MAIN = ("ppo", "so_ppo", "grpo", "so_grpo")
REUSE = ("4, of 8", "4, 2 steps stale", "3, of 32", "6, of 16", "12, of 8")  # optimizer steps on a batch
TRUST = " + trust region"  # behind an algorithm's name, in the runs that have one
RATES = (5e-5, 1.6e-4, 5e-4, 1.6e-3, 5e-3)  # those that all rows of the grid have

QUESTIONS = 64  # of an evaluation, in all studies that are asked how much a run kept

Run = Mapping[str, Any]


def read(name: str) -> list[Run]:
    """The runs of a study that are committed.

    Raises:
        ValueError: one is there twice, and would count twice.
    """
    path = DOCS / "stability" / f"{name}.jsonl"
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    which = Counter((run["cell"], run["seed"]) for run in runs)
    twice = [key for key, times in which.items() if times > 1]
    if twice:
        raise ValueError(f"{path}: more than once: {twice}")
    return runs


def whole_grid() -> list[Run]:
    """The runs of the grid of rates and reuse, those with a trust region among them."""
    runs = [run for name in ("region", "mini_batch", "staleness") for run in read(name)]
    for run in read("trust_region"):
        algo, _, reuse = run["arm"].partition(", ")
        runs.append({**run, "arm": algo + TRUST, "reuse": reuse})
    return [run for run in runs if run["optim.lr"] in RATES]


def reuse_of(run: Run) -> str:
    """The row of a run: which study it is from says what it varied."""
    if "reuse" in run:
        return {"4 of 8 stale": REUSE[1]}.get(run["reuse"], str(run["reuse"]).replace(" of ", ", of "))
    if "rollout.max_staleness" in run:
        return f"4, {run['rollout.max_staleness']} steps stale"
    if "update.mini_batch_size" in run:
        return f"{96 // run['update.mini_batch_size']}, of {run['update.mini_batch_size']}"
    return f"{4 * run['update.epochs']}, of 8"


def has_learned(run: Run) -> bool:
    """Whether its success was ever clearly above the cold start's."""
    return learned([success for _, success in run["curve"]], QUESTIONS)


def unlearned(runs: Sequence[Run]) -> str:
    """How many of the runs learned nothing."""
    return f"{sum(not has_learned(run) for run in runs)} of {len(runs)}"


def cells_of(runs: Sequence[Run], arm: str, figure: str) -> dict[tuple[str, float], list[float]]:
    """A figure's values, one a seed, by reuse and rate. ``held`` is ``kept_mean`` of a run that learned, else 0."""
    cells: dict[tuple[str, float], list[float]] = defaultdict(list)
    for run in runs:
        if run["arm"] == arm:
            value = run["kept_mean"] * has_learned(run) if figure == "held" else run[figure]
            cells[reuse_of(run), run["optim.lr"]].append(value)
    return cells


Cells = Mapping[tuple[str, float], Sequence[float]]


def average(cells: Cells, draws: int = 2000) -> tuple[float, float, float]:
    """Over the grid, the mean of medians over seeds, with a 95% bootstrap interval over its points and their seeds."""
    generator = np.random.default_rng(0)
    points = sorted(cells)
    drawn = np.zeros((len(points), draws))
    for row, point in enumerate(points):
        values = np.asarray(cells[point])
        drawn[row] = np.median(values[generator.integers(0, len(values), size=(draws, len(values)))], axis=1)
    again = generator.integers(0, len(points), size=(draws, len(points)))
    low, high = np.quantile(drawn[again, np.arange(draws)[:, None]].mean(axis=1), [0.025, 0.975])
    return float(np.mean([np.median(cells[point]) for point in points])), float(low), float(high)


def share_above(bar: float, cells: Cells) -> tuple[float, float, float]:
    """The share of the grid whose median over seeds is above ``bar``, with Wilson's interval."""
    found = mean_interval([float(np.median(cells[point]) > bar) for point in sorted(cells)])
    return found.mean, found.low, found.high
