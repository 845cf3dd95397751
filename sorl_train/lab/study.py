"""A study: one config, varied along axes and repeated with several seeds; its runs, their results, and a table.

A study is a YAML file::

    base: quickstart                 # the config of every run
    settings: {update.steps: 12}     # changes to it, for all runs
    seeds: [0, 1, 2]
    arms:                            # what is compared: names, each with its settings
      ppo: {algo: ppo}
      so_ppo: {algo: so_ppo}
    axes:                            # each arm is run with every combination of these values
      optim.lr: [3e-4, 1e-3]
      reuse: {once: {update.epochs: 1}, thrice: {update.epochs: 3}}  # or of named settings
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.commands.command import say
from sorl_env.errors import UserError, did_you_mean
from sorl_env.text import markdown_table
from sorl_train.config.files import (
    STUDIES,
    config_folder,
    config_hash,
    find_config,
    load_config,
    merge,
    nest,
    parse_yaml,
)
from sorl_train.config.settings import TrainConfig
from sorl_train.report.groups import setting_text
from sorl_train.run.files import atomic_write, read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import infinite_if_none, measure, success_curve

KEYS = ("base", "settings", "seeds", "arms", "axes")


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: an arm, a point on the axes, a seed."""

    arm: str
    point: tuple[tuple[str, Any], ...]
    seed: int
    config: TrainConfig

    @property
    def cell(self) -> str:
        """Arm and point as text; runs that differ in the seed alone share it."""
        return ", ".join([self.arm, *(f"{name}={setting_text(value)}" for name, value in self.point)])

    @property
    def facts(self) -> dict[str, Any]:
        """Which run it is, as a line of results says it."""
        return {"cell": self.cell, "arm": self.arm, **dict(self.point), "seed": self.seed, "id": self.id}

    @functools.cached_property
    def id(self) -> str:
        """The name of the run's folder; different settings give different names."""
        return f"{self.arm}-s{self.seed}-{config_hash(self.config)[:10]}"


@dataclass(frozen=True)
class Study:
    """All runs of a study, ordered so that every cell runs its first seed before any runs its second."""

    name: str
    runs: tuple[StudyRun, ...]


def packaged_studies() -> list[str]:
    """Names of the studies in the package."""
    return sorted(file.stem for file in (config_folder() / STUDIES).glob("*.yaml"))


def load_study(name_or_path: str) -> Study:
    """Read a study and check the settings of every run. Raises ``UserError`` if there is no such file, for an unknown
    key or a wrong value, for settings that do not fit together, and for a run given twice; it names the cell."""
    packaged = config_folder() / STUDIES / f"{name_or_path}.yaml"
    path = packaged if packaged.is_file() else Path(name_or_path)
    if not path.is_file():
        raise UserError(f"no study {name_or_path!r}. {did_you_mean(name_or_path, packaged_studies())}")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: it is not UTF-8 text ({error}); a study is a YAML file") from error
    if not isinstance(content, dict) or set(content) - set(KEYS):
        unknown = [key for key in content if key not in KEYS] if isinstance(content, dict) else content
        raise UserError(f"{path}: a study has the keys {', '.join(KEYS)}, not {unknown}")
    study = {name: value for name, value in content.items() if value is not None}
    _check_form(path, study)
    arms, named = study.get("arms", {"default": None}), study.get("axes", {})
    axes = {
        axis: [
            (value, values[value] or {} if isinstance(values, dict) else {axis: value}) for value in values
        ]
        for axis, values in named.items()
    }
    base = find_config(study.get("base", "quickstart"), beside=path.parent)
    runs: dict[str, StudyRun] = {}
    for seed, (arm, settings) in itertools.product(study.get("seeds", [0]), arms.items()):
        for values in itertools.product(*axes.values()):
            point = tuple((axis, value) for axis, (value, _) in zip(axes, values, strict=True))
            own = dict(settings or {})
            for _, chosen in values:
                own |= chosen
            # axes are for all arms, and may switch on what an arm sets: then not every run has to read all of it
            strict = {name: value for name, value in own.items() if not axes or name == "algo"}
            try:
                shared = merge(nest(study.get("settings", {})), nest(own))
                config = load_config(base, {**strict, "seed": seed}, shared=shared)
                run = StudyRun(arm, point, seed, config)
            except UserError as error:
                raise UserError(f"{path}, {arm} at {dict(point)}: {error}") from error
            if run.id in runs:
                raise UserError(
                    f"{path}: {run.cell}, seed {seed} is there twice: remove the repeated value from seeds or axes"
                )
            runs[run.id] = run
    return Study(path.stem, tuple(runs.values()))


# What a key of a study must hold, and how that is said.
_FORMS = {
    "settings": (dict, "settings with values, as {update.steps: 12}"),
    "seeds": (list, "a list of numbers, as [0, 1, 2]"),
    "arms": (dict, "names with their settings, as {ppo: {algo: ppo}}"),
    "axes": (dict, "settings with lists of values, as {optim.lr: [3e-4, 1e-3]}"),
}


def _check_form(path: Path, study: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a value that has not the form shown at the top of this module."""

    def check(holds: bool, what: str, form: str) -> None:
        if not holds:
            raise UserError(f"{path}: {what}: expected {form}")

    for key, (kind, form) in _FORMS.items():
        check(isinstance(study.get(key, kind()), kind), f"{key}: {study.get(key)}", form)
    axes = study.get("axes", {})
    named = {name: values for name, values in axes.items() if isinstance(values, dict)}
    for name, values in {"seeds": study.get("seeds", [0]), **axes}.items():
        check(isinstance(values, list) or name in named, f"{name}: {values}", "a list of values")
        check(bool(values), f"{name}: {values}", "a list of values")
    for name, values in named.items():
        good = all(isinstance(settings or {}, dict) for settings in values.values())
        check(good, f"axis {name}: {values}", _FORMS["arms"][1])
    set_by_axes = (axes.keys() - named.keys()).union(
        *(set(s or {}) for v in named.values() for s in v.values())
    )
    for name, settings in study.get("arms", {}).items():
        form = "a text without '/' (on, off and numbers in quotes): it names the folders of its runs"
        check(isinstance(name, str) and "/" not in name, f"arm {name!r}", form)
        check(isinstance(settings or {}, dict), f"arm {name}: {settings}", _FORMS["settings"][1])
        both = ", ".join(sorted(map(str, set_by_axes & (settings or {}).keys())))
        check(not both, f"arm {name} sets {both}", "the setting in the arms or in the axes, not in both")
    for place in (study.get("settings", {}), set_by_axes, *study.get("arms", {}).values()):
        check("seed" not in (place or {}), "seed", "the seeds in the key seeds: [0, 1, 2]")


# name in the results, heading, format
_MEDIANS = (
    ("peak", "peak", ".3f"),
    ("final", "final", ".3f"),
    ("kept", "final / peak", ".2f"),
    ("kept_mean", "of means", ".2f"),
    ("worst_drop", "worst drop", ".2f"),
    ("max_grad_norm", "max grad norm", ".2g"),
    ("normalized", "normalized", ".2f"),
    ("mean_rate", "mean rate", ".1e"),
)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with a row per cell: medians over the seeds and, of several, the lowest and highest."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        cells.setdefault(result["cell"], []).append(result)
    rows = []
    for cell, runs in cells.items():
        found = [([infinite_if_none(run[name]) for run in runs], form) for name, _, form in _MEDIANS]
        medians = [with_range(np.median, values, form) for values, form in found]
        known = [run["learned"] for run in runs if run["learned"] is not None]
        steps = [run["collapse_step"] for run in runs if run["collapse_step"] is not None]
        at = f", median step {np.median(steps):g}" if steps else ""
        rows.append(
            [cell, len(runs), *medians, f"{known.count(0.0)}/{len(known)}", f"{len(steps)}/{len(runs)}{at}"]
        )
    heads = [
        "cell",
        "seeds",
        *(heading for _, heading, _ in _MEDIANS),
        "ended less than .1 above its start",
        "collapsed",
    ]
    return markdown_table(heads, rows)


def with_range(middle: Callable[..., Any], values: Sequence[float], form: str, to: str = "-") -> str:
    """The median or mean and, of several values, the lowest and highest: a bootstrap of so few could not say more."""
    spread = f" ({min(values):{form}}{to}{max(values):{form}})" if len(values) > 1 else ""
    return f"{middle(values):{form}}{spread}"


def write_results(study: Study, folder: Path) -> list[dict[str, Any]]:
    """Write ``results.jsonl`` with a line for each finished run, and return those of the study.

    They are which run it was, its figures, and the success of its evaluations. A figure is None where there is none, or
    where it was not finite. A run that cannot be measured is left out, and named. Lines that are not written anew stay,
    such as those whose run folder is gone.
    """
    path = folder / "results.jsonl"
    written = {line["id"]: line for line in read_jsonl(path)}
    results = []
    for run in study.runs:
        run_dir = folder / "runs" / run.id
        if RunDir(run_dir).summary.is_file():
            try:
                measured = measure(run_dir)
            except UserError as error:
                say("sorl-lab", f"{run.cell}, seed {run.seed} is not in the table: {error}")
                continue
            figures = {name: value if math.isfinite(value) else None for name, value in measured.items()}
            results.append(run.facts | figures | {"curve": success_curve(run_dir)})
            written.pop(run.id, None)
        elif run.id in written and not run_dir.is_dir():
            results.append(written.pop(run.id))
    atomic_write(path, "".join(f"{json.dumps(line)}\n" for line in [*results, *written.values()]))
    return results
