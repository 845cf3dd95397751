"""A study: one config, varied along axes, with seeds. Cells, what each run measured, and a table with intervals.

A study is a YAML file::

    base: quickstart                 # the config of every run
    settings: {update.steps: 12}     # over it
    seeds: [0, 1, 2]
    arms:                            # what is compared; each a name and settings
      ppo: {algo: ppo}
      so_ppo: {algo: so_ppo}
    axes:                            # every combination of these values, for each arm
      optim.lr: [3e-4, 1e-3]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.errors import UserError, did_you_mean
from sorl_train.config.files import STUDIES, config_folder, config_hash, find_config, load_config, parse_yaml
from sorl_train.config.settings import TrainConfig
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import infinite_if_none, measure, success_curve

KEYS = ("base", "settings", "seeds", "arms", "axes")


@dataclass(frozen=True)
class Run:
    """One run of a study: an arm, a point on the axes, a seed."""

    arm: str
    point: tuple[tuple[str, Any], ...]
    seed: int
    config: TrainConfig

    @property
    def cell(self) -> str:
        """Arm and point: runs that differ in the seed alone share it."""
        return ", ".join(
            [
                self.arm,
                *(
                    f"{name}={value:g}" if _is_number(value) else f"{name}={value}"
                    for name, value in self.point
                ),
            ]
        )

    @functools.cached_property
    def id(self) -> str:
        """A folder's name, other for other settings."""
        return f"{self.arm}-s{self.seed}-{config_hash(self.config)[:10]}"


@dataclass(frozen=True)
class Study:
    """All runs of a study, in an order that finishes every cell's first seed before any second one."""

    name: str
    runs: tuple[Run, ...]


def packaged_studies() -> list[str]:
    """Names of the studies that the package brings along."""
    return sorted(file.stem for file in (config_folder() / STUDIES).glob("*.yaml"))


def load_study(name_or_path: str) -> Study:
    """Read a study and check every run's settings.

    Raises:
        UserError: no such file, an unknown key or one of another form, settings that do not fit together, naming the
            cell, or runs that are the same twice.
    """
    packaged = config_folder() / STUDIES / f"{name_or_path}.yaml"
    path = packaged if packaged.is_file() else Path(name_or_path)
    if not path.is_file():
        raise UserError(f"no study {name_or_path!r}. {did_you_mean(name_or_path, packaged_studies())}")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: it is not UTF-8 text ({error}); a study is a YAML file") from error
    if not isinstance(content, dict) or set(content) - set(KEYS):
        unknown = sorted(set(content) - set(KEYS)) if isinstance(content, dict) else content
        raise UserError(f"{path}: a study has the keys {', '.join(KEYS)}, not {unknown}")
    study = {name: value for name, value in content.items() if value is not None}
    _check_form(path, study)
    arms, axes = study.get("arms", {"default": None}), study.get("axes", {})
    base = find_config(study.get("base", "quickstart"), beside=path.parent)
    runs: dict[str, Run] = {}
    for seed, (arm, settings) in itertools.product(study.get("seeds", [0]), arms.items()):
        for values in itertools.product(*axes.values()):
            point = tuple(zip(axes, values, strict=True))
            overrides = {**study.get("settings", {}), **(settings or {}), **dict(point), "seed": seed}
            try:
                run = Run(arm, point, seed, load_config(base, overrides))
            except UserError as error:
                raise UserError(f"{path}, {arm} at {dict(point)}: {error}") from error
            if run.id in runs:
                raise UserError(f"{path}: {run.cell}, seed {seed} is there twice; drop one of seeds or axes")
            runs[run.id] = run
    return Study(path.stem, tuple(runs.values()))


def _check_form(path: Path, study: Mapping[str, Any]) -> None:
    """Raise a ``UserError`` for a key that is not of the form that the head of this module shows."""

    def check(holds: bool, what: str, form: str) -> None:
        if not holds:
            raise UserError(f"{path}: {what}: expected {form}")

    arms, axes, seeds = study.get("arms", {}), study.get("axes", {}), study.get("seeds", [0])
    check(
        isinstance(study.get("settings", {}), dict), "settings", "settings with values, as {update.steps: 12}"
    )
    check(isinstance(seeds, list) and bool(seeds), f"seeds: {seeds}", "a list of numbers, as [0, 1, 2]")
    check(isinstance(arms, dict), f"arms: {arms}", "names with their settings, as {ppo: {algo: ppo}}")
    check(
        isinstance(axes, dict), f"axes: {axes}", "settings with lists of values, as {optim.lr: [3e-4, 1e-3]}"
    )
    for name, values in axes.items():
        check(isinstance(values, list) and bool(values), f"axes, {name}: {values}", "a list of values")
    for name, settings in arms.items():
        check("/" not in str(name), f"arm {name!r}", "a name without '/': it names the folders of its runs")
        check(isinstance(settings or {}, dict), f"arm {name}: {settings}", "settings, as {algo: ppo}")
        for axis in axes:
            check(
                axis not in (settings or {}),
                f"arm {name} sets {axis}",
                "it in the arms or in the axes, not in both",
            )
    for place in (study.get("settings", {}), axes, *arms.values()):
        check("seed" not in (place or {}), "seed", "the seeds in the key seeds: [0, 1, 2]")


def interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float, float]:
    """Median and percentile bootstrap interval of it; of one value, that value three times."""
    data = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(0).integers(0, len(data), size=(draws, len(data)))
    medians = np.median(data[draw], axis=1)
    whole = np.isfinite(data).all()  # else there are no values in between: inf - inf is NaN
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(medians, ends, method="linear" if whole else "inverted_cdf")
    return float(np.median(data)), float(low), float(high)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: a line a cell, medians over seeds and, of several, the 95% intervals of these."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        cells.setdefault(result["cell"], []).append(result)
    lines = [
        "| cell | seeds | peak | final | final/peak | of means | worst drop | collapsed | max grad norm | normalized "
        "| mean rate |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, rows in cells.items():
        steps = [row["collapse_step"] for row in rows if row["collapse_step"] is not None]
        at = f", median step {np.median(steps):g}" if steps else ""
        columns = (
            cell,
            len(rows),
            _spread([row["peak"] for row in rows], ".3f"),
            _spread([row["final"] for row in rows], ".3f"),
            _spread([row["kept"] for row in rows], ".2f"),
            _spread([row["kept_mean"] for row in rows], ".2f"),
            _spread([row["worst_drop"] for row in rows], ".2f"),
            f"{len(steps)}/{len(rows)}{at}",
            _spread([infinite_if_none(row["max_grad_norm"]) for row in rows], ".2g"),
            _spread([row["normalized"] for row in rows], ".2f"),
            f"{np.median([row['mean_rate'] for row in rows]):.1e}",
        )
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    """The median and, of several values, its interval."""
    median, low, high = interval(values)
    return f"{median:{form}}" + (f" ({low:{form}}-{high:{form}})" if len(values) > 1 else "")


def results_of(study: Study, folder: Path) -> list[dict[str, Any]]:
    """A line for each run that is finished: which it was, its figures (null: none, or for the highest gradient norm
    one that was not finite) and its evaluations."""
    results = []
    for run in study.runs:
        run_dir = folder / "runs" / run.id
        if RunDir(run_dir).summary.is_file():
            figures = {
                name: value if math.isfinite(value) else None for name, value in measure(run_dir).items()
            }
            what = {"cell": run.cell, "arm": run.arm, **dict(run.point), "seed": run.seed, "id": run.id}
            results.append(what | figures | {"curve": success_curve(run_dir)})
    return results


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
