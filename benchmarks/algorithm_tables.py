"""The tables of docs/algorithms.md on what the algorithms do on MiniHop; ``stability_tables.py`` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from stability_runs import DOCS, read

from sorl_env.figures import markdown_table
from sorl_train.lab import compare
from sorl_train.lab.study import load_study

GOOD = 0.8  # on questions that are rarely paid, less than ``compare.GOOD``


def which_one() -> str:
    """``sorl-lab compare``: each algorithm at its own best rate, and at ten times it.

    The seconds of a step are from runs of their own, one after the other on an idle machine.
    """
    seconds = json.loads((DOCS / "stability" / "algorithms_seconds.json").read_text(encoding="utf-8"))
    runs = [{**run, "step_s": seconds["median_step_s"][run["arm"]]} for run in read("algorithms")]
    return compare.table(load_study("algorithms"), runs)


def turn_credit() -> str:
    """A line an arm: steps to ``GOOD`` by seed, and final success."""
    runs, rows = read("turn_credit"), []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = sorted((run for run in runs if run["arm"] == arm), key=lambda run: run["seed"])
        steps = [compare.steps_to(run, GOOD) for run in own]
        finals = [run["final"] for run in own]
        begun = [run["curve"][0][1] for run in own]
        rows.append(
            [
                arm,
                f"{np.mean(begun):.2f}",
                " ".join("-" if np.isinf(step) else f"{step:g}" for step in steps),
                compare.mean_and_range(finals),
            ]
        )
    return markdown_table(["", "success before", f"steps to {GOOD:g}, by seed", "final success"], rows)


def tables() -> dict[str, Callable[[], str]]:
    """Name in the page to what makes the table."""
    return {"which_one": which_one, "turn_credit": turn_credit}
