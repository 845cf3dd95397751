"""The tables of docs/stability.md, docs/normalization.md and docs/algorithms.md, from the committed results.

python benchmarks/stability_tables.py           # says which tables of the pages differ; exit status 1 if one does
python benchmarks/stability_tables.py --write   # puts them into the pages

A table stands in a page below a line ``<!-- table NAME -->``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
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
    larger_mini_batch,
    read,
    reuse_of,
    share_above,
    unlearned,
)

from sorl_env.figures import markdown_table
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.lab.alarm import AHEAD, Recorded, count, judge, read_runs
from sorl_train.lab.study import load_study
from sorl_train.run.alarm import Alarm, CollapseAlarm

PAGES = (DOCS / "stability.md", DOCS / "normalization.md", DOCS / "algorithms.md")
EARLY = 3  # steps after which strain says something
STRAINS = (0.0, 0.07, 0.15, 0.2, 0.25, 1.0)
CLASSES = ("tag", "reasoning", "query", "answer")


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
    header = (
        "arm | seeds | peak | final | final / peak | of means | worst drop | learned nothing | collapsed "
        "| highest gradient norm | clip fraction | normalized | mean rate"
    )
    return markdown(header.split(" | "), rows)


def _measured(runs: Sequence[Run]) -> list[str]:
    steps = [run["collapse_step"] for run in runs if run["collapse_step"] is not None]
    return [
        f"{_median(runs, 'peak'):.2f}",
        f"{_median(runs, 'final'):.2f}",
        _spread([run["kept"] for run in runs]),
        _spread([run["kept_mean"] for run in runs]),
        f"{_median(runs, 'worst_drop'):.2f}",
        unlearned(runs),
        f"{len(steps)} of {len(runs)}" + (f", from step {np.median(steps):g}" if steps else ""),
        f"{_median(runs, 'max_grad_norm'):.1f}",
        f"{_median(runs, 'clip_frac'):.3f}",
        f"{_median(runs, 'normalized'):.2f}",
        f"{_median(runs, 'mean_rate'):.1e}",
    ]


def _median(runs: Sequence[Run], name: str) -> float:
    return float(np.median([run[name] for run in runs]))


def _spread(values: Sequence[float]) -> str:
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{np.median(values):.2f}{spread}"


def grid(runs: Sequence[Run], chosen: Sequence[str] = MAIN) -> str:
    """Algorithms by rates: final success; in brackets final over peak, of means, and the number of seeds."""
    rates = sorted({run["optim.lr"] for run in runs})
    cells = {
        (arm, rate): [run for run in runs if run["arm"] == arm and run["optim.lr"] == rate]
        for arm in chosen
        for rate in rates
    }
    rows = [[arm, *(_cell(cells[arm, rate]) for rate in rates)] for arm in chosen]
    return markdown(["", *(f"{rate:.1e}".replace("e-0", "e-") for rate in rates)], rows)


def _cell(runs: Sequence[Run]) -> str:
    if not runs:
        return "-"
    return f"{_median(runs, 'final'):.2f} ({_median(runs, 'kept_mean'):.2f}, {len(runs)})"


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


def shares(runs: Sequence[Run]) -> str:
    """Over the grid, how much of what it had an algorithm keeps, and how much more that is than without SO."""
    rows = []
    for arm, base in (("ppo", None), ("so_ppo", "ppo"), ("grpo", None), ("so_grpo", "grpo")):
        held, row = cells_of(runs, arm, "held"), [arm]
        less = cells_of(runs, base, "held") if base else None
        for bar in (0.95, 0.8):
            row.append("{:.0%} ({:.0%} to {:.0%})".format(*share_above(bar, held)))
            more = "{:+.0%} ({:+.0%} to {:+.0%})"
            row.append(more.format(*share_above(bar, held, less)) if less else "")
        cells = cells_of(runs, arm, "kept_mean")
        without = cells_of(runs, base, "kept_mean") if base else None
        row.append("{:.2f} ({:.2f} to {:.2f})".format(*average(cells)))
        row.append("{:+.2f} ({:+.2f} to {:+.2f})".format(*average(cells, without)) if without else "")
        rows.append([*row, unlearned([run for run in runs if run["arm"] == arm]), str(len(cells))])
    header = "held above .95 | more | held above .80 | more | mean of final / peak | more | learned nothing | cells"
    return markdown(["", *header.split(" | ")], rows)


# the two settings of the grid that were given five seeds because PPO and GRPO break there (docs: the severe settings)
HARD = {"first": ("12, of 8", 5e-4), "second": ("3, of 32", 1.6e-3)}


def without_hard(runs: Sequence[Run]) -> str:
    """How much more SO keeps over the grid, with the severe settings and without them."""
    rows = []
    for name, left_out in (
        ("all", ()),
        ("without the first severe setting", ("first",)),
        ("without the second", ("second",)),
        ("without both", ("first", "second")),
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


def by_seed(runs: Sequence[Run]) -> str:
    """A line an arm with the values of its seeds, for arms of one or two."""
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = sorted((run for run in runs if run["arm"] == arm), key=lambda run: int(run["seed"]))
        collapsed = ", ".join(_step(run["collapse_step"]) for run in own)
        final, peak = (", ".join(f"{run[name]:.2f}" for run in own) for name in ("final", "peak"))
        figures = (f"{max(run['max_grad_norm'] for run in own):.1f}", f"{_median(own, 'clip_frac'):.3f}")
        rows.append([arm, final, peak, collapsed, *figures, f"{_median(own, 'normalized'):.2f}"])
    header = (
        "arm | final success, by seed | peak | collapsed from step | highest gradient norm | clip fraction "
        "| normalized"
    )
    return markdown(header.split(" | "), rows)


def _step(step: float | None) -> str:
    return "-" if step is None else f"{step:g}"


def token_classes(runs: Sequence[Run], chosen: Sequence[str] = MAIN) -> str:
    """The classes' shares of all tokens and of the clipped ones."""
    rows = []
    for arm in chosen:
        own = [run for run in runs if run["arm"] == arm]
        names = [f"{kind}_{name}" for name in CLASSES for kind in ("tokens", "clipped")]
        rows.append(
            [arm, *(f"{_median([run for run in own if run[name] is not None], name):.2f}" for name in names)]
        )
    header = [f"{name}, {of}" for name in CLASSES for of in ("all tokens", "the clipped")]
    return markdown(["", *header], rows)


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
    header = "runs | collapsed | alarm 5 steps ahead | of those with 5 steps | before | in time | healthy | alarmed"
    return markdown(header.split(" | "), [[name, *_alarmed(runs)] for name, runs in sets.items()])


def _alarmed(runs: Sequence[Recorded]) -> list[str]:
    found = count([judge(run, AlarmConfig()) for run in runs])
    lost = ["", "", "", ""]
    if found.collapsed:
        ahead = f"{found.ahead} ({found.ahead / found.collapsed:.0%})"
        lost = [ahead, f"{found.ahead} of {found.possible}", str(found.before), str(found.in_time)]
    alarmed = f"{found.alarmed} ({found.alarmed / found.healthy:.0%})" if found.alarmed else "0"
    return [str(found.collapsed), *lost, str(found.healthy), alarmed]


def peak_rate() -> str:
    """At rising rates: what became of runs, and which were alarmed, by the rate that they end at."""
    rates = {run.cell: run.config.optim.lr for run in load_study("alarm").runs}
    rows = []
    for name, label in (("runs", "seeds 0 to 6: set on these"), ("held_out", "later seeds: held out")):
        runs = [run for run in records(name) if run.study == "alarm"]
        for rate in sorted({rates[run.cell] for run in runs}, reverse=True):
            judged = [judge(run, AlarmConfig()) for run in runs if rates[run.cell] == rate]
            figures = (
                len(judged),
                sum(x.lost is not None for x in judged),
                sum(x.alarm is not None for x in judged),
            )
            rows.append([label, f"{rate:.1e}".replace("e-0", "e-"), *map(str, figures)])
    return markdown(["runs", "peak rate", "how many", "collapsed", "alarmed"], rows)


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


# simpler alarms, which read nothing but the KL of each step: from those of the steps so far to whether to alarm
SIMPLER: Mapping[str, Callable[[Sequence[float]], bool]] = {
    "the KL of one step above .01": lambda kl: kl[-1] > 0.01,
    "its mean over three steps above .005": lambda kl: float(np.mean(kl[-3:])) > 0.005,
    "its mean over all steps, each at most .045, above .003": lambda kl: (
        float(np.mean(np.minimum(kl, 0.045))) > 0.003
    ),
    "its median over all steps above .001": lambda kl: len(kl) > 2 and float(np.median(kl)) > 0.001,
}
ONLY_STRAIN = AlarmConfig(ratio_tail=1e9, invalid_turns=1e9, grad_norm=1e9, entropy=1e9)


def simpler_alarms() -> str:
    """Alarms from the KL alone beside the one that there is: collapses seen ahead, and healthy runs alarmed."""
    held_out = records("held_out")
    sets = {
        "rising rates: set on these": records("runs"),
        "rising, held out": [run for run in held_out if run.study == "alarm"],
        "constant, held out": [run for run in held_out if run.study != "alarm"],
    }
    judges = {
        "all five signals": lambda run: _step_of(judge(run, AlarmConfig()).alarm),
        "strain alone": lambda run: _step_of(judge(run, ONLY_STRAIN).alarm),
    } | {name: functools.partial(_first, rule) for name, rule in SIMPLER.items()}
    rows = []
    for name, step_of in judges.items():
        row = [name]
        for runs in sets.values():
            found = [(judge(run, AlarmConfig()).lost, step_of(run)) for run in runs]
            lost = [(at, alarm) for at, alarm in found if at is not None]
            healthy = [alarm for at, alarm in found if at is None]
            ahead = sum(alarm is not None and at - alarm >= AHEAD for at, alarm in lost)
            alarmed = sum(alarm is not None for alarm in healthy)
            row.append(f"{ahead} of {len(lost)}; {alarmed} of {len(healthy)}")
        rows.append(row)
    return markdown(["collapses seen 5 steps ahead; healthy runs alarmed", *sets], rows)


def _step_of(alarm: Alarm | None) -> int | None:
    return None if alarm is None else alarm.step


def _first(rule: Callable[[Sequence[float]], bool], run: Recorded) -> int | None:
    """The step in which a rule first alarms."""
    seen: list[float] = []
    for line in run.lines:
        if "loss/grad_norm" in line:
            kl = line.get("loss/approx_kl", 0.0)
            seen.append(math.inf if kl is None else kl)
            if rule(seen):
                return int(line["step"])
    return None


def strain_of(run: Recorded, steps: int) -> float | None:
    """After so many training steps; None where there were fewer."""
    watch, trained = CollapseAlarm(AlarmConfig()), [line for line in run.lines if "loss/grad_norm" in line]
    for line in trained[:steps]:
        watch.observe(line["step"], line)
    return watch.strain if len(trained) >= steps else None


def tables() -> dict[str, Callable[[], str]]:
    """Name in the page to what makes the table."""
    severe, region_runs, mini_batch, staleness = map(read, ("severe", "region", "mini_batch", "staleness"))
    everywhere = [*region_runs, *mini_batch, *staleness]
    control = {
        "ppo": "ppo",
        "so_ppo": "so_ppo",
        "ppo lr 2.9e-4": "ppo at 2.9e-4",
        "ppo target KL .02": "ppo, target KL .02",
        "ppo dual clip 3": "ppo, dual clip 3",
        "ppo grad clip .1": "ppo, gradient clipped at .1",
        "grpo": "grpo",
        "so_grpo": "so_grpo",
        "grpo lr 2.6e-4": "grpo at 2.6e-4",
        "grpo target KL .02": "grpo, target KL .02",
        "grpo skip without signal": "grpo, no step without a signal",
    }
    parts = (
        "ppo, turn_ppo, gspo, s_ppo, so_ppo, so_ppo rms .003, so_ppo token 1, so_ppo trajectory scope, "
        "so_ppo gradient target"
    )
    so_grpo = (
        "grpo, so_grpo, so_grpo rms .003, so_grpo token 1, so_grpo turn ratio, so_grpo KL .01, so_grpo KL .01 k2, "
        "so_grpo skip without signal"
    )
    orders = [f"so_ppo gradient target, clipped {order}" for order in ("last", "first")]
    return {
        **trust_tables.tables(),
        **algorithm_tables.tables(),
        "severe": lambda: arms(severe, MAIN),
        "larger": lambda: arms(larger_mini_batch(), [*MAIN, "so_ppo rms .003", "so_grpo rms .003"]),
        "region_12": lambda: grid([run for run in region_runs if run["update.epochs"] == 3]),
        "region_4": lambda: grid([run for run in region_runs if run["update.epochs"] == 1]),
        "held": lambda: held(everywhere),
        "without_hard": lambda: without_hard([run for run in everywhere if run["optim.lr"] in RATES]),
        "shares": lambda: shares([run for run in everywhere if run["optim.lr"] in RATES]),
        "mini_batch_32": lambda: grid([run for run in mini_batch if run["update.mini_batch_size"] == 32]),
        "mini_batch_16": lambda: grid([run for run in mini_batch if run["update.mini_batch_size"] == 16]),
        "staleness": lambda: grid(staleness),
        "cost": lambda: arms(
            [*one_epoch(region_runs), *read("cost")],
            ("ppo", "turn_ppo", "s_ppo", "so_ppo", "so_ppo rms .003"),
        ),
        "control": lambda: arms(severe, control),
        "parts": lambda: arms(severe, [*parts.split(", "), *orders]),
        "harder": lambda: by_seed(read("harder")),
        "long_turns": lambda: arms(read("long_turns"), ("ppo", "turn_ppo", "s_ppo", "so_ppo")),
        "so_grpo": lambda: arms(severe, so_grpo.split(", ")),
        "token_classes": lambda: token_classes(severe),
        "alarm": alarm,
        "peak_rate": peak_rate,
        "strain": strain,
        "simpler_alarms": simpler_alarms,
    }


def one_epoch(runs: Sequence[Run]) -> list[Run]:
    """Those at the rate of the study ``cost``."""
    return [run for run in runs if (run["update.epochs"], run["optim.lr"]) == (1, 5e-4)]


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
