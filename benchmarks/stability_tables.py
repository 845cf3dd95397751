"""The tables of docs/stability.md, docs/report.md and docs/algorithms.md, from the committed results.

python benchmarks/stability_tables.py           # says which tables of the pages differ; exit status 1 if one does
python benchmarks/stability_tables.py --write   # puts them into the pages

A table stands in a page below a line ``<!-- table NAME -->``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.text import markdown_table
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.evaluate.intervals import mean_interval
from sorl_train.lab import compare
from sorl_train.lab.alarm import Recorded, count, judge, read_runs
from sorl_train.lab.study import load_study
from sorl_train.run.stability import learned

DOCS = Path(__file__).resolve().parents[1] / "docs"
MAIN = ("ppo", "so_ppo", "grpo", "so_grpo")
REUSE = ("4, of 8", "4, 2 steps stale", "3, of 32", "6, of 16", "12, of 8")  # optimizer steps on a batch
TRUST = " + trust region"  # behind an algorithm's name, in the runs that have one
RATES = (5e-5, 1.6e-4, 5e-4, 1.6e-3, 5e-3)  # those that all rows of the grid have
Run = Mapping[str, Any]
PAGES = (DOCS / "stability.md", DOCS / "algorithms.md", DOCS / "report.md")
LONG_RATES, SETTLED = (1.6e-4, 1.6e-3, 5e-3), 100  # of the runs of 300 steps
RARELY_PAID = 0.8  # the success up to which rarely paid questions are waited for, below ``compare.GOOD``
# the arms of the severe study that are in the table, and what the page calls them
SEVERE = {
    "ppo": "ppo",
    "ppo lr 2.9e-4": "ppo at 2.9e-4",
    "turn_ppo": "turn_ppo",
    "s_ppo": "s_ppo",
    "so_ppo": "so_ppo",
    "so_ppo rms .003": "so_ppo, rms .003",
    "so_ppo gradient target": "so_ppo, gradient scaled",
    "grpo": "grpo",
    "grpo lr 2.6e-4": "grpo at 2.6e-4",
    "gspo": "gspo",
    "so_grpo": "so_grpo",
    "so_grpo rms .003": "so_grpo, rms .003",
    "so_grpo KL .01": "so_grpo, KL .01 (k3)",
    "so_grpo KL .01 k2": "so_grpo, KL .01 (k2)",
}


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
    """Whether its success ended at least .1 above the cold start's."""
    return learned([success for _, success in run["curve"]])


def unlearned(runs: Sequence[Run]) -> str:
    """How many of the runs ended less than .1 above their start."""
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


def severe(name: str = "severe") -> str:
    """A line an arm: medians over seeds, and the range of final over peak."""
    rows = []
    for arm, label in SEVERE.items():
        runs = [run for run in read(name) if run["arm"] == arm]
        if not runs:
            continue
        steps = [run["collapse_step"] for run in runs if run["collapse_step"] is not None]
        median = {
            name: float(np.median([run[name] for run in runs]))
            for name in ("final", "clip_frac", "mean_rate")
        }
        kept = [run["kept"] for run in runs]
        spread = f" ({min(kept):.2f} to {max(kept):.2f})" if len(kept) > 1 else ""
        rows.append(
            [
                label,
                f"{median['final']:.2f}",
                f"{np.median(kept):.2f}{spread}",
                f"{len(steps)} of {len(runs)}" + (f", from step {np.median(steps):g}" if steps else ""),
                f"{median['clip_frac']:.3f}",
                f"{median['mean_rate']:.1e}",
            ]
        )
    header = "arm | final | final / peak | collapsed | clip fraction | mean rate"
    return markdown_table(header.split(" | "), rows)


def held(bars: Sequence[float] = (0.95, 0.8)) -> str:
    """By reuse: the highest rate up to which the median of final over peak, of means, stays above a bar.

    A run that ended less than .1 above its start held nothing.
    """
    runs = [run for name in ("region", "mini_batch", "staleness") for run in read(name)]
    rows = []
    for reuse in REUSE:
        row = [reuse]
        for arm in MAIN:
            cells = cells_of([run for run in runs if reuse_of(run) == reuse], arm, "held")
            kept = {rate: float(np.median(values)) for (_, rate), values in sorted(cells.items())}
            row.append(" / ".join(_highest(kept, bar) for bar in bars))
        rows.append(row)
    return markdown_table(["optimizer steps a batch", *MAIN], rows)


def _highest(kept: Mapping[float, float], bar: float) -> str:
    good = list(itertools.takewhile(lambda rate: kept[rate] > bar, kept))
    return _rate(good[-1]) if good else "none"


def _rate(rate: float) -> str:
    return f"{rate:.1e}".replace("e-0", "e-")


def trust_grid(algo: str) -> str:
    """An algorithm by reuse and rate, as it is and with a trust region: median of final success."""
    rows = []
    for reuse in REUSE:
        here = [run for run in whole_grid() if reuse_of(run) == reuse]
        for arm in (algo, algo + TRUST):
            finals = [
                [run["final"] for run in here if (run["arm"], run["optim.lr"]) == (arm, rate)]
                for rate in RATES
            ]
            if any(finals):
                rows.append([reuse, arm, *(f"{np.median(found):.2f}" if found else "-" for found in finals)])
    return markdown_table(["optimizer steps a batch", "", *map(_rate, RATES)], rows)


def shares(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Over the grid: how much of what it had each arm keeps, and how high it ends; arms without runs are left out."""
    rows = []
    for arm in arms:
        kept, final = cells_of(runs, arm, "held"), cells_of(runs, arm, "final")
        if not kept:
            continue
        figures = [
            "{:.0%} ({:.0%} to {:.0%})".format(*share_above(0.95, kept)),
            "{:.2f} ({:.2f} to {:.2f})".format(*average(final)),
            f"{min(float(np.median(values)) for values in final.values()):.2f}",
        ]
        rows.append([arm, *figures, unlearned([run for run in runs if run["arm"] == arm])])
    header = " | held above .95 | mean final success | lowest | ended less than .1 above its start"
    return markdown_table(header.split(" | "), rows)


def trust_shares() -> str:
    """PPO and GRPO alone, with the paper's normalization, and with a trust region."""
    arms = [arm for algo in ("ppo", "grpo") for arm in (algo, f"so_{algo}", algo + TRUST)]
    return shares(whole_grid(), arms)


def remedies() -> str:
    """The remedies of others, with PPO and with GRPO, on those cells of the grid that all have run; the best last."""
    runs = read("remedies")
    arms = {run["arm"] for run in runs}
    common = set.intersection(*(set(cells_of(runs, arm, "final")) for arm in arms))
    runs = [run for run in runs if (reuse_of(run), run["optim.lr"]) in common]
    rows: dict[str, list[str]] = {}
    means: dict[str, float] = defaultdict(float)
    for arm in sorted(arms, reverse=True):  # PPO's before GRPO's
        name = arm.split(maxsplit=1)[1]
        held = sum(np.median(values) > 0.95 for values in cells_of(runs, arm, "held").values())
        final = cells_of(runs, arm, "final")
        mean, low, high = average(final)
        lowest = min(float(np.median(values)) for values in final.values())
        spread = f"{mean:.2f} ({low:.2f} to {high:.2f})"
        slow = sum(not has_learned(run) for run in runs if run["arm"] == arm)
        rows.setdefault(name, [name]).extend([str(held), spread, f"{lowest:.2f}", str(slow)])
        means[name] += mean
    figures = "held | mean final success | lowest | not learned"
    header = f" | PPO: {figures} | GRPO: {figures}".split(" | ")
    return markdown_table(header, sorted(rows.values(), key=lambda row: means[row[0]]))


def remedies_best() -> str:
    """Each remedy at its best of three settings, which other cells chose, where that is not the published one.

    The setting, how many cells it held, and its mean final success; in brackets that of the published one. Below, what
    the algorithms and the trust region do on these cells.
    """
    published, best = read("remedies"), read("remedies_best")
    points = {(reuse_of(run), run["optim.lr"]) for run in best}
    here = [run for run in published if (reuse_of(run), run["optim.lr"]) in points]
    names = {run["arm"].split(maxsplit=1)[1] for run in here}
    rows: dict[str, dict[str, str]] = defaultdict(dict)

    def figures(runs: Sequence[Run], arm: str) -> tuple[int, float]:
        held, final = (cells_of(runs, arm, figure).values() for figure in ("held", "final"))
        mean = float(np.mean([np.median(values) for values in final]))
        return sum(bool(np.median(values) > 0.95) for values in held), mean

    for arm in dict.fromkeys(run["arm"] for run in best):
        algo, rest = arm.split(maxsplit=1)
        name = next(name for name in names if rest.startswith(f"{name} "))
        held, mean = figures(best, arm)
        before = figures(here, f"{algo} {name}")[1]
        rows[name][algo] = f"{rest.removeprefix(name).strip()}: {held}; {mean:.2f} ({before:.2f})"
    for name, algo in itertools.product(("alone", "trust region .01"), ("ppo", "grpo")):
        if name in names:
            rows[name][algo] = "{}; {:.2f}".format(*figures(here, f"{algo} {name}"))
    cells = [[name, *(row.get(algo, "-") for algo in ("ppo", "grpo"))] for name, row in rows.items()]
    return markdown_table(["", "PPO: setting, held, mean final success", "GRPO: the same"], cells)


def records(name: str) -> list[Recorded]:
    """Recorded runs that the alarm is judged on."""
    return read_runs([DOCS / "stability" / f"alarm_{name}.jsonl"])


def alarm() -> str:
    """What the alarm sees of recorded runs, and whether it was set on them."""
    others, held_out = records("other_runs"), records("held_out")
    sets = {
        "rising rates, seeds 0 to 6: set on these": records("runs"),
        "quickstarts: set on these": [run for run in others if run.study == "quickstart"],
        "constant rates, earlier runs: looked at": [run for run in others if run.study != "quickstart"],
        "rising rates, later seeds: held out": [run for run in held_out if run.study == "alarm"],
        "constant rates, later runs: held out": [run for run in held_out if run.study != "alarm"],
    }
    rows = []
    for name, runs in sets.items():
        found = count([judge(run, AlarmConfig()) for run in runs])
        ahead = f"{found.ahead} ({found.ahead / found.collapsed:.0%})" if found.collapsed else ""
        alarmed = f"{found.alarmed} ({found.alarmed / found.healthy:.0%})" if found.alarmed else "0"
        rows.append([name, found.collapsed, ahead, found.healthy, alarmed])
    header = "runs | collapsed | alarm 5 steps ahead | healthy | alarmed"
    return markdown_table(header.split(" | "), rows)


def which_one() -> str:
    """``sorl-lab compare``: each algorithm at its own best rate, and at ten times it.

    The seconds of a step are from runs of their own, one after the other on an idle machine.
    """
    seconds = json.loads((DOCS / "stability" / "algorithms_seconds.json").read_text(encoding="utf-8"))
    runs = [{**run, "step_s": seconds["median_step_s"][run["arm"]]} for run in read("algorithms")]
    return compare.table(load_study("algorithms"), runs)


def grid_again() -> str:
    """``trust_shares`` of the runs that repeat the grid: another machine, later code, one seed."""
    names = {"alone": "", "SO": "so_", "trust region .01": ""}
    arms = {f"{algo} {name}": f"{so}{algo}" for algo in ("ppo", "grpo") for name, so in names.items()}
    arms |= {arm: name + TRUST for arm, name in arms.items() if arm.endswith("region .01")}
    return shares([{**run, "arm": arms[run["arm"]]} for run in read("grid_again")], list(arms.values()))


def turn_credit() -> str:
    """A line an arm: steps to ``RARELY_PAID`` by seed, and final success."""
    runs, rows = read("turn_credit"), []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = sorted((run for run in runs if run["arm"] == arm), key=lambda run: int(run["seed"]))
        steps = [compare.steps_to(run, RARELY_PAID) for run in own]
        shown = " ".join("-" if np.isinf(step) else f"{step:g}" for step in steps)
        begun = np.mean([run["curve"][0][1] for run in own])
        rows.append([arm, f"{begun:.2f}", shown, compare.mean_and_range([run["final"] for run in own])])
    return markdown_table(["", "success before", f"steps to {RARELY_PAID:g}, by seed", "final success"], rows)


def before_and_after(name: str) -> str:
    """A line an arm of a study: success before training, at its best, and after it."""
    runs, rows = read(name), []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        before = [run["curve"][0][1] for run in own]
        others = ([run[name] for run in own] for name in ("peak", "final"))
        rows.append([arm, *map(compare.mean_and_range, (before, *others)), unlearned(own)])
    return markdown_table(["", "before", "best", "after", "ended less than .1 above its start"], rows)


def length() -> str:
    """Long runs by staleness and rate: final success, the lowest from step ``SETTLED`` on, final and lowest scale c."""
    runs, rows = read("length"), []
    key = operator.itemgetter("arm", "rollout.max_staleness")
    for arm, staleness in dict.fromkeys(map(key, runs)):
        cells = []
        for rate in LONG_RATES:
            seeds = [run for run in runs if (*key(run), run["optim.lr"]) == (arm, staleness, rate)]
            if not seeds:
                cells.append("-")
                continue
            settled = [[success for step, success in run["curve"] if step >= SETTLED] for run in seeds]
            # a run that collapsed has ended before
            lowest = [min([*later, run["final"]]) for later, run in zip(settled, seeds, strict=True)]
            text = ", ".join(map(compare.mean_and_range, ([run["final"] for run in seeds], lowest)))
            if seeds[0]["scale"] is not None:
                scale, least = (np.mean([run[name] for run in seeds]) for name in ("scale", "least_scale"))
                text += f"; {scale:.3f}, {least:.3f}"
            cells.append(text)
        rows.append([arm, str(staleness), *cells])
    return markdown_table(["", "staleness", *map(_rate, LONG_RATES)], rows)


def ppo_rates() -> str:
    """PPO on tasks of Gymnasium by learning rate: mean final return of the seeds, alone and with a trust region."""
    path = DOCS / "stability" / "ppo_rates.jsonl"
    runs, rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], []
    rates = sorted({run["lr"] for run in runs})
    for env_id, limit in itertools.product(dict.fromkeys(run["env_id"] for run in runs), (None, 0.1)):
        cells = []
        for rate in rates:
            same = (env_id, limit, rate)
            finals = [run["final"] for run in runs if (run["env_id"], run["limit"], run["lr"]) == same]
            cells.append("NaN" if None in finals else f"{np.mean(finals):.0f}")
        rows.append([env_id, f"trust region {limit}" if limit else "alone", *cells])
    return markdown_table(["", "", *(f"{rate:g}" for rate in rates)], rows)


def qwen() -> str:
    """Exact match of Qwen2.5-Coder-0.5B on test questions, before and after training, a column a run."""
    runs = [json.loads(line) for line in (DOCS / "qwen.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {
        "as-it-comes direct": "as it comes, from memory",
        "as-it-comes rag": "as it comes, three passages in the prompt",
        "as-it-comes-agent agent": "as it comes, with the search tool",
        "cold agent": "after imitation, with the search tool",
        "rl agent": "after RL from there",
    }
    rows = []
    for key, name in names.items():
        found = [run["scores"][key]["em"] if key in run["scores"] else None for run in runs]
        cells = (
            f"{em['mean']:.3f} ({em['low']:.3f} to {em['high']:.3f})" if em else "not run" for em in found
        )
        rows.append([name, *cells])
    rows.append(["steps of imitation", *(str(run["sft_steps"]) for run in runs)])
    rows.append(["batches of RL", *(str(max(map(int, run["rl"]), default=0)) for run in runs)])
    chosen = (str(run.get("best_step", "not recorded")) for run in runs)
    rows.append(["the batch whose weights held-out training questions chose", *chosen])
    columns = [{"nq": "NQ", "hotpotqa": "HotpotQA"}[run["task"]] + f", seed {run['seed']}" for run in runs]
    return markdown_table(["Qwen2.5-Coder-0.5B, exact match", *columns], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "severe": severe,
    "severe_again": lambda: severe("severe_again"),
    "held": held,
    "trust_shares": trust_shares,
    "remedies": remedies,
    "remedies_best": remedies_best,
    "trust_ppo": lambda: trust_grid("ppo"),
    "length": length,
    "ppo_rates": ppo_rates,
    "qwen": qwen,
    "grid_again": grid_again,
    "alarm": alarm,
    "which_one": which_one,
    "turn_credit": turn_credit,
    **{
        name: functools.partial(before_and_after, name)
        for name in ("long_horizon", "smollm2_severe", "qwen_severe")
    },
}


def rewritten(page: str) -> str:
    """The page with each table as the results have it. Raises ``KeyError`` for a marker that names no table."""
    marked = r"(?P<marker><!-- table (?P<name>\w+) -->\n)(\|.*\n)*"
    return re.sub(marked, lambda match: f"{match['marker']}{TABLES[match['name']]().rstrip()}\n", page)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    writes = parser.parse_args(argv).write
    differing = []
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = rewritten(old)
        differing += [line for line in new.splitlines() if line not in old]
        if writes:
            page.write_text(new, encoding="utf-8")
    print(
        "\n".join(
            ["lines that the pages did not have:", *differing] if differing else ["the tables are these"]
        )
    )
    return int(bool(differing) and not writes)


if __name__ == "__main__":
    sys.exit(main())
