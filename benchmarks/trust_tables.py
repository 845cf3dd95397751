"""The tables of docs/stability.md on the trust region, from the committed results, for ``stability_tables.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from stability_runs import (
    RATES,
    REUSE,
    TRUST,
    Run,
    average,
    cells_of,
    read,
    reuse_of,
    share_above,
    unlearned,
    whole_grid,
)

from sorl_env.figures import markdown_table

GOOD = 0.9  # success that ``steps_to`` waits for


def grid(runs: Sequence[Run], algo: str) -> str:
    """An algorithm by reuse and rate, as it is and with a trust region: final success."""
    rows = []
    for reuse in REUSE:
        here = [run for run in runs if reuse_of(run) == reuse]
        for arm in (algo, algo + TRUST):
            cells = [[run for run in here if (run["arm"], run["optim.lr"]) == (arm, rate)] for rate in RATES]
            if any(cells):
                rows.append([reuse, arm, *map(_final, cells)])
    return markdown_table(["optimizer steps a batch", "", *map(_rate, RATES)], rows)


def _rate(rate: float) -> str:
    return f"{rate:.1e}".replace("e-0", "e-")


def _final(runs: Sequence[Run]) -> str:
    return f"{np.median([run['final'] for run in runs]):.2f}" if runs else "-"


def shares(runs: Sequence[Run]) -> str:
    """Over the grid: how much of what it had an algorithm keeps, and how high it ends, with and without a region."""
    rows = []
    for algo in ("ppo", "grpo"):
        for arm in (algo, f"so_{algo}", algo + TRUST, f"so_{algo}{TRUST}"):
            held, final = cells_of(runs, arm, "held"), cells_of(runs, arm, "final")
            if not held:
                continue
            figures = [
                "{:.0%} ({:.0%} to {:.0%})".format(*share_above(0.95, held)),
                "{:.2f} ({:.2f} to {:.2f})".format(*average(final)),
                f"{min(float(np.median(values)) for values in final.values()):.2f}",
            ]
            nothing = unlearned([run for run in runs if run["arm"] == arm])
            rows.append([arm, *figures, nothing, str(len(held))])
    header = " | held above .95 | mean final success | lowest | learned nothing | cells"
    return markdown_table(header.split(" | "), rows)


def by_seed(runs: Sequence[Run]) -> str:
    """A line an arm and rate: final success and the steps to ``GOOD``, one figure a seed."""
    cells: dict[tuple[str, float, float], list[Run]] = {}
    for run in sorted(runs, key=lambda run: int(run["seed"])):
        cells.setdefault((run["arm"], run.get("optim.lr", 0.0), run.get("update.trust_kl", 0.0)), []).append(
            run
        )
    rows = []
    for (arm, rate, limit), own in sorted(cells.items()):
        name = arm + (f", rate {_rate(rate)}" if rate else "") + (f", limit {limit:g}" if limit else "")
        moves = [run["moves_back"] for run in own if run["moves_back"] is not None]
        rows.append(
            [
                name,
                " ".join(f"{run['final']:.2f}" for run in own),
                f"{np.mean([run['final'] for run in own]):.3f}",
                " ".join(map(_steps_to, own)),
                f"{np.median(moves):g}" if moves else "",
            ]
        )
    return markdown_table(["", "final success, by seed", "mean", f"steps to {GOOD:g}", "moves back"], rows)


def _steps_to(run: Run) -> str:
    """The first evaluation with success of at least ``GOOD``, or a dash."""
    return next((str(step) for step, success in run["curve"] if success >= GOOD), "-")


def second_scale(runs: Sequence[Run]) -> str:
    """A line an arm: success after each evaluation, and what the updates were like."""
    rows = []
    for run in runs:
        lost = run["collapse_step"]
        rows.append(
            [
                run["arm"],
                ", ".join(f"{success:.2f}" for _, success in run["curve"]),
                "-" if lost is None else f"{lost:g}",
                "-" if run["moves_back"] is None else f"{run['moves_back']:g}",
                f"{run['max_grad_norm']:.1f}",
                _rate(run["mean_rate"]),
            ]
        )
    steps = ", ".join(str(step) for step, _ in runs[0]["curve"])
    header = f" | success after {steps} steps | collapsed | moves back | highest gradient norm | mean rate"
    return markdown_table(header.split(" | "), rows)


def tables() -> Mapping[str, Callable[[], str]]:
    """Name in the page to what makes the table."""
    return {
        "trust_shares": lambda: shares(whole_grid()),
        "trust_ppo": lambda: grid(whole_grid(), "ppo"),
        "trust_grpo": lambda: grid(whole_grid(), "grpo"),
        "trust_rates": lambda: by_seed(read("trust_rates")),
        "trust_smollm2": lambda: second_scale(read("smollm2_severe")),
    }
