"""The tables of docs/stability.md and docs/algorithms.md, from the committed results.

python benchmarks/stability_tables.py           # says which tables of the pages differ; exit status 1 if one does
python benchmarks/stability_tables.py --write   # puts them into the pages

A table stands in a page below a line ``<!-- table NAME -->``.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import algorithm_tables
import numpy as np
import trust_tables
from stability_runs import (
    DOCS,
    MAIN,
    RATES,
    REUSE,
    Run,
    average,
    cells_of,
    read,
    reuse_of,
)

from sorl_env.figures import markdown_table
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.lab.alarm import Recorded, count, judge, read_runs
from sorl_train.run.alarm import CollapseAlarm

PAGES = (DOCS / "stability.md", DOCS / "algorithms.md")
EARLY = 3  # steps after which strain says something
STRAINS = (0.0, 0.07, 0.15, 0.2, 0.25, 1.0)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(header, rows) + "\n"


def arms(runs: Sequence[Run], chosen: Mapping[str, str] | Sequence[str]) -> str:
    """A line an arm that has runs: medians over seeds, and the range of final over peak."""
    named = chosen if isinstance(chosen, Mapping) else {arm: arm for arm in chosen}
    rows = []
    for arm, label in named.items():
        own = [run for run in runs if run["arm"] == arm]
        if own:
            rows.append([label, str(len(own)), *_measured(own)])
    header = "arm | seeds | final | final / peak | collapsed | clip fraction | mean rate"
    return markdown(header.split(" | "), rows)


def _measured(runs: Sequence[Run]) -> list[str]:
    steps = [run["collapse_step"] for run in runs if run["collapse_step"] is not None]
    return [
        f"{_median(runs, 'final'):.2f}",
        _spread([run["kept"] for run in runs]),
        f"{len(steps)} of {len(runs)}" + (f", from step {np.median(steps):g}" if steps else ""),
        f"{_median(runs, 'clip_frac'):.3f}",
        f"{_median(runs, 'mean_rate'):.1e}",
    ]


def _median(runs: Sequence[Run], name: str) -> float:
    return float(np.median([run[name] for run in runs]))


def _spread(values: Sequence[float]) -> str:
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{np.median(values):.2f}{spread}"


def held(runs: Sequence[Run], bars: Sequence[float] = (0.95, 0.8)) -> str:
    """By reuse: the highest rate up to which the median of final over peak, of means, stays above a bar.

    A run that learned nothing held nothing.
    """
    rows = []
    for reuse in REUSE:
        row = [reuse]
        for arm in MAIN:
            cells = cells_of([run for run in runs if reuse_of(run) == reuse], arm, "held")
            kept = {rate: float(np.median(values)) for (_, rate), values in sorted(cells.items())}
            row.append(" / ".join(_highest(kept, bar) for bar in bars))
        rows.append(row)
    return markdown(["optimizer steps a batch", *MAIN], rows)


def _highest(kept: Mapping[float, float], bar: float) -> str:
    good = list(itertools.takewhile(lambda rate: kept[rate] > bar, kept))
    return f"{good[-1]:.1e}".replace("e-0", "e-") if good else "none"


# the two settings of the grid that were given five seeds because PPO and GRPO break there (docs: the severe settings)
HARD = {"first": ("12, of 8", 5e-4), "second": ("3, of 32", 1.6e-3)}


def without_hard(runs: Sequence[Run]) -> str:
    """How much more SO keeps over the grid, with the severe settings and without them."""
    rows = []
    for name, left_out in (
        ("all", ()),
        ("without the severe settings", ("first", "second")),
    ):
        hard = {HARD[each] for each in left_out}
        row = [name]
        for arm, base in (("so_ppo", "ppo"), ("so_grpo", "grpo")):
            own, other = (
                {
                    point: values
                    for point, values in cells_of(runs, each, "kept_mean").items()
                    if point not in hard
                }
                for each in (arm, base)
            )
            row.append("{:+.3f} ({:+.3f} to {:+.3f})".format(*average(own, other)))
        rows.append([*row, str(len(own))])
    return markdown(["cells", "so_ppo over ppo", "so_grpo over grpo", "how many"], rows)


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
    header = "runs | collapsed | alarm 5 steps ahead | healthy | alarmed"
    return markdown(header.split(" | "), [[name, *_alarmed(runs)] for name, runs in sets.items()])


def _alarmed(runs: Sequence[Recorded]) -> list[str]:
    found = count([judge(run, AlarmConfig()) for run in runs])
    ahead = f"{found.ahead} ({found.ahead / found.collapsed:.0%})" if found.collapsed else ""
    alarmed = f"{found.alarmed} ({found.alarmed / found.healthy:.0%})" if found.alarmed else "0"
    return [str(found.collapsed), ahead, str(found.healthy), alarmed]


def strain() -> str:
    """At constant rates: what became of runs, by their strain over the first steps."""
    found: dict[tuple[float, float], list[bool]] = {limits: [] for limits in itertools.pairwise(STRAINS)}
    for run in (run for name in ("other_runs", "held_out") for run in records(name)):
        lost, early = judge(run, AlarmConfig()).lost, strain_of(run, EARLY)
        if run.study not in ("alarm", "quickstart") and early is not None and (lost is None or lost > EARLY):
            found[next(limits for limits in found if early < limits[1])].append(lost is not None)
    rows = []
    for (low, high), collapsed in found.items():
        named = (
            f"{low:.2f} to {high:.2f}"
            if low and high < 1
            else f"below {high:.2f}"
            if high < 1
            else f"{low:.2f} or more"
        )
        rows.append([named, str(len(collapsed)), f"{sum(collapsed)} ({np.mean(collapsed):.0%})"])
    return markdown([f"strain of steps 1 to {EARLY}", "runs", "collapsed later"], rows)


def strain_of(run: Recorded, steps: int) -> float | None:
    """After so many training steps; None where there were fewer."""
    watch, trained = CollapseAlarm(AlarmConfig()), [line for line in run.lines if "loss/grad_norm" in line]
    for line in trained[:steps]:
        watch.observe(line["step"], line)
    return watch.strain if len(trained) >= steps else None


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


def tables() -> dict[str, Callable[[], str]]:
    """Name in the page to what makes the table."""
    severe, region_runs, mini_batch, staleness = map(read, ("severe", "region", "mini_batch", "staleness"))
    everywhere = [*region_runs, *mini_batch, *staleness]
    return {
        **trust_tables.tables(),
        **algorithm_tables.tables(),
        "severe": lambda: arms(severe, SEVERE),
        "held": lambda: held(everywhere),
        "without_hard": lambda: without_hard([run for run in everywhere if run["optim.lr"] in RATES]),
        "alarm": alarm,
        "strain": strain,
    }


def rewritten(pages: Sequence[str]) -> list[str]:
    """The pages with each table as the results have it.

    Raises:
        KeyError: a marker with a name that no table has, or a table without a marker.
    """
    made, seen = tables(), set()

    def replace(match: re.Match[str]) -> str:
        seen.add(match["name"])
        return f"{match['marker']}{made[match['name']]().rstrip()}\n"

    marked = r"(?P<marker><!-- table (?P<name>\w+) -->\n)(\|.*\n)*"
    new = [re.sub(marked, replace, page) for page in pages]
    if set(made) - seen:
        raise KeyError(f"no page has a marker for {', '.join(sorted(set(made) - seen))}")
    return new


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    writes = parser.parse_args(argv).write
    old = [page.read_text(encoding="utf-8") for page in PAGES]
    new = rewritten(old)
    if writes:
        for page, text in zip(PAGES, new, strict=True):
            page.write_text(text, encoding="utf-8")
        return 0
    differing = [
        line
        for before, after in zip(old, new, strict=True)
        for line in after.splitlines()
        if line not in before
    ]
    print(
        "\n".join(["these lines are not in the pages:", *differing])
        if new != old
        else "the pages' tables are these"
    )
    return int(new != old)


if __name__ == "__main__":
    sys.exit(main())
