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

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.errors import UserError, did_you_mean
from sorl_train.config import TrainConfig
from sorl_train.config_io import STUDIES, config_folder, config_hash, find_config, load_config, parse_yaml
from sorl_train.metrics_log import read_jsonl
from sorl_train.run_dir import RunDir
from sorl_train.summary import COLLAPSED
from sorl_train.token_classes import CLASSES

KEYS = ("base", "settings", "seeds", "arms", "axes")
SMALLEST_PEAK = 0.05  # a run that never learned anything has nothing to keep
WINDOW = 3  # evaluations that ``kept_mean`` averages


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

    @property
    def id(self) -> str:
        """A folder's name, other for other settings."""
        return f"{self.arm}-s{self.seed}-{config_hash(self.config)[:10]}"


@dataclass(frozen=True)
class Study:
    """All runs of a study, in an order that finishes every cell's first seed before any second one."""

    name: str
    runs: tuple[Run, ...]


def load_study(name_or_path: str) -> Study:
    """Read a study and check every run's settings.

    Raises:
        UserError: no such file, an unknown key, or settings that do not fit together, naming the cell.
    """
    packaged = config_folder() / STUDIES / f"{name_or_path}.yaml"
    path = packaged if packaged.is_file() else Path(name_or_path)
    if not path.is_file():
        known = [file.stem for file in (config_folder() / STUDIES).glob("*.yaml")]
        raise UserError(f"no study {name_or_path!r}. {did_you_mean(name_or_path, known)}")
    content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, dict) or set(content) - set(KEYS):
        unknown = sorted(set(content) - set(KEYS)) if isinstance(content, dict) else content
        raise UserError(f"{path}: a study has the keys {', '.join(KEYS)}, not {unknown}")
    arms = content.get("arms") or {"default": {}}
    axes = content.get("axes") or {}
    base = find_config(content.get("base", "quickstart"), beside=path.parent)
    runs = []
    for seed, (arm, settings) in itertools.product(content.get("seeds", [0]), arms.items()):
        for values in itertools.product(*axes.values()):
            point = tuple(zip(axes, values, strict=True))
            overrides = {**(content.get("settings") or {}), **(settings or {}), **dict(point), "seed": seed}
            try:
                config = load_config(base, overrides)
            except UserError as error:
                raise UserError(f"{path}, {arm} at {dict(point)}: {error}") from error
            runs.append(Run(arm, point, seed, config))
    return Study(path.stem, tuple(runs))


def measure(run_dir: Path) -> dict[str, float]:
    """What a finished run says about stability.

    ``peak`` and ``final``: highest and last greedy success; ``kept``: final / peak (0 where nothing was learned);
    ``kept_mean``: the same of means over ``WINDOW`` evaluations in a row. The highest of many noisy evaluations lies
    above what the policy can do, and ``kept`` so below 1 even where nothing is lost;
    ``worst_drop``: the deepest fall from the peak so far; ``collapse_step``: the first evaluation from which success
    stayed below half its peak (NaN: none); ``max_grad_norm``; ``normalized``: share of optimizer steps that the
    clipping bias scaled; ``mean_rate``: mean effective learning rate; ``clip_frac``: mean share of clipped tokens;
    ``tokens_CLASS`` and ``clipped_CLASS``: the classes' shares of all tokens and of the clipped ones (NaN: none).
    """
    curve = success_curve(run_dir)
    trained = [line for line in read_jsonl(RunDir(run_dir).metrics) if "loss/grad_norm" in line]
    if not curve or not trained:
        raise UserError(f"{run_dir}: no evaluation or no training step in its metrics")
    steps, success = zip(*curve, strict=True)
    peaks = list(itertools.accumulate(success, max))
    peak, final = peaks[-1], success[-1]
    below = [value < COLLAPSED * top for value, top in zip(success, peaks, strict=True)]
    lasting = next((steps[i] for i in range(len(below)) if all(below[i:])), math.nan)

    def mean(name: str) -> float:
        return math.fsum(line[name] for line in trained if line[name] is not None) / len(trained)

    return {
        "peak": peak,
        "final": final,
        "kept": _kept(success),
        "kept_mean": _kept(_means(success)),
        "worst_drop": max(top - value for value, top in zip(success, peaks, strict=True)),
        "collapse_step": float(lasting),
        "max_grad_norm": max(_number(line["loss/grad_norm_max"]) for line in trained),
        "normalized": mean("loss/normalized_frac"),
        "mean_rate": mean("loss/effective_lr"),
        "clip_frac": mean("loss/clip_frac"),
        "grad_norm": mean("loss/grad_norm"),
        **_clipped_classes(trained),
    }


def _clipped_classes(trained: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    figures = {}
    for name in CLASSES:
        shares = [line.get(f"loss/token_share_{name}", 0.0) for line in trained]
        clipped = [
            share * line.get(f"loss/clip_frac_{name}", 0.0)
            for share, line in zip(shares, trained, strict=True)
        ]
        total = math.fsum(line.get("loss/clip_frac", 0.0) for line in trained)
        figures[f"tokens_{name}"] = math.fsum(shares) / len(trained)
        figures[f"clipped_{name}"] = math.fsum(clipped) / total if total else math.nan
    return figures


def success_curve(run_dir: Path) -> list[tuple[int, float]]:
    """Step and greedy success of each evaluation."""
    lines = read_jsonl(RunDir(run_dir).metrics)
    return [(line["step"], line["eval/success"]) for line in lines if "eval/success" in line]


def _means(success: Sequence[float]) -> list[float]:
    """Means of ``WINDOW`` values in a row; of all where there are fewer."""
    width = min(WINDOW, len(success))
    return [math.fsum(success[i : i + width]) / width for i in range(len(success) - width + 1)]


def _kept(curve: Sequence[float]) -> float:
    """Last over highest, 0 where nothing was learned."""
    return curve[-1] / max(curve) if max(curve) >= SMALLEST_PEAK else 0.0


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float, float]:
    """Median and percentile bootstrap interval of it; of one value, that value three times."""
    data = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(0).integers(0, len(data), size=(draws, len(data)))
    medians = np.median(data[draw], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(data)), float(low), float(high)


def region(
    cells: Mapping[str, Sequence[float]], bar: float = 0.95, draws: int = 2000
) -> tuple[float, float, float]:
    """Share of cells whose median over seeds is above ``bar``, with a 95% bootstrap interval.

    Drawn again are the cells, as another grid over the same range might have them, and the seeds within each.
    """
    generator = np.random.default_rng(0)
    above = [np.median(values) > bar for values in cells.values()]
    drawn = np.stack(
        [
            np.median(
                np.asarray(values)[generator.integers(0, len(values), size=(draws, len(values)))], axis=1
            )
            > bar
            for values in cells.values()
        ]
    )
    again = generator.integers(0, len(cells), size=(draws, len(cells)))
    shares = drawn[again, np.arange(draws)[:, None]].mean(axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(np.mean(above)), float(low), float(high)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: a line a cell, medians and intervals over seeds."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        cells.setdefault(result["cell"], []).append(result)
    lines = [
        "| cell | seeds | peak | final | final/peak | of means | worst drop | collapsed | max grad norm | normalized "
        "| mean rate |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, rows in cells.items():
        kept, low, high = interval([row["kept"] for row in rows])
        steps = [row["collapse_step"] for row in rows if not math.isnan(_nan(row["collapse_step"]))]
        at = f" from step {np.median(steps):g}" if steps else ""
        median = {
            name: float(np.median([row[name] for row in rows]))
            for name in ("peak", "final", "worst_drop", "max_grad_norm", "normalized", "mean_rate")
        }
        columns = (
            cell,
            len(rows),
            f"{median['peak']:.3f}",
            f"{median['final']:.3f}",
            f"{kept:.2f} ({low:.2f}-{high:.2f})",
            "{:.2f} ({:.2f}-{:.2f})".format(*interval([row["kept_mean"] for row in rows])),
            f"{median['worst_drop']:.2f}",
            f"{len(steps)}/{len(rows)}{at}",
            f"{median['max_grad_norm']:.2g}",
            f"{median['normalized']:.2f}",
            f"{median['mean_rate']:.1e}",
        )
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(lines)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def results_of(study: Study, folder: Path) -> list[dict[str, Any]]:
    """A line for each run that is finished: which it was, its figures (NaN as null) and its evaluations."""
    results = []
    for run in study.runs:
        run_dir = folder / "runs" / run.id
        if RunDir(run_dir).summary.is_file():
            figures = {name: None if math.isnan(value) else value for name, value in measure(run_dir).items()}
            what = {"cell": run.cell, "arm": run.arm, **dict(run.point), "seed": run.seed, "id": run.id}
            results.append(what | figures | {"curve": success_curve(run_dir)})
    return results


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
