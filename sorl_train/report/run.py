"""Reads a run folder for the report: all that is there, and notes about what is missing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from sorl_env.errors import UserError, did_you_mean
from sorl_env.text import read_json
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.find_algorithm import short_name
from sorl_train.config.run_settings import STEPS, TRAINED
from sorl_train.config.schema import fields, flatten, unread
from sorl_train.config.settings import TrainConfig
from sorl_train.report.dialogues import COUNT, Dialogue, choose_dialogues, step_files
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import measure

MetricRow = Mapping[str, Any]  # a line of metrics.jsonl: metrics by name, with their step
_T = TypeVar("_T")

_LEARNING = ("optim.", "update.", "rollout.", "replay.", "correction.", "overlong.")


@dataclass(frozen=True)
class ReportRun:
    """One run as the page shows it: its settings by dotted name, and the lines of its logs by step.

    ``results`` are the numbers of ``summary.json``, or as of the last step, and those of its stability that are known
    (``sorl_train.run.stability.measure``). ``cell`` is, in a study, the name that it shares with the runs that differ
    in the seed alone. ``finished`` says whether it wrote its summary, ``data_samples`` which of its data are only an
    embedded sample of a benchmark, and ``notes`` what is missing or unreadable.
    """

    label: str
    path: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    metrics: Sequence[MetricRow]
    timings: Sequence[MetricRow]
    results: Mapping[str, float]
    events: Sequence[MetricRow]
    finished: bool
    data_samples: Sequence[str]
    dialogues: Sequence[Dialogue]
    notes: Sequence[str]
    cell: str | None = None

    @property
    def title(self) -> str:
        """Algorithm and task."""
        return f"{self.algo} on {self.task}" if self.config.get("algo") and self.config.get("task") else "run"

    @property
    def algo(self) -> str:
        """Short name of the algorithm."""
        return short_name(str(self.config.get("algo", "unknown")))

    @property
    def is_measured(self) -> bool:
        """Whether its stability is known: from its first evaluation and step on."""
        return "worst_drop" in self.results

    @property
    def normalizes(self) -> bool:
        """Whether its algorithm scales steps by the clipping bias; of one from outside, whether it ever did."""
        known = ALGORITHMS.get(str(self.config.get("algo")))
        return known.normalize if known else any(row.get("loss/normalized_frac") for row in self.metrics)

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.config.get("task", "unknown"))

    @property
    def last_step(self) -> int:
        """Number of the last step with metrics; 0 before the first."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def planned_steps(self) -> int | None:
        """The number of training steps in the settings; None if they have none."""
        planned = self.config.get("sft.steps" if self.config.get("stage") == "sft" else "update.steps")
        return planned if isinstance(planned, int) else None

    @property
    def ended_early(self) -> bool:
        """Whether the run finished before its last step, because ``eval.patience`` or the alarm ended it."""
        return self.finished and self.last_step < (self.planned_steps or 0)

    @property
    def status(self) -> str:
        """How far the run got, in words."""
        at = f"step {self.last_step}" + (f" of {self.planned_steps}" if self.planned_steps else "")
        if self.ended_early:
            return f"ended early (eval.patience or alarm.action): {at}"
        return f"finished, {self.last_step} steps" if self.finished else f"unfinished: {at}"

    @property
    def key_settings(self) -> Mapping[str, Any]:
        """The settings to show first, if its algorithm reads them: those that most runs touch, those of the loss, and
        others about learning that have not their default."""
        known, default = ALGORITHMS.get(str(self.config.get("algo"))), flatten(TrainConfig())
        hidden = unread(known, {**default, **self.config}) if known else ()
        shown = {}
        for field in fields():
            value, is_common = self.config.get(field.name), field.common in (TRAINED.heading, STEPS.heading)
            changed = field.name.startswith(_LEARNING) and value != default[field.name]
            if value is not None and (is_common or changed or field.name.startswith("loss.")):
                shown[field.name] = value
        return {name: value for name, value in shown.items() if name not in hidden}


def read_run(path: Path, label: str, dialogues: int = COUNT, cell: str | None = None) -> ReportRun:
    """Read the folder of a finished or unfinished run, with at most ``dialogues`` of its dialogues. Raises
    ``UserError`` if the folder does not exist or has nothing to show."""
    if path.is_file():
        raise UserError(f"{path} is a file; give the folder of a run or of a study")
    if not path.is_dir():
        siblings = [entry.name for entry in path.parent.glob("*/")] if path.parent.is_dir() else []
        raise UserError(f"no run folder {str(path)!r}. {did_you_mean(path.name, siblings)}")
    run = RunDir(path)
    notes: list[str] = []
    # not ``read_resolved``, because a report must open runs of other versions, too
    config = (
        _read(run.config, lambda file: _flatten(_mapping(yaml.safe_load(file.read_bytes()))), notes) or {}
    )
    manifest = _read(run.manifest, _json_mapping, notes) or {}
    metrics = _read(run.metrics, lambda file: _rows(file, notes), notes) or []
    timings = _read(run.timings, lambda file: _rows(file, notes), notes) or []
    summary = _read(run.summary, _json_mapping, notes) or {}
    if not (config or metrics or step_files(run.trajectories)):
        raise UserError(
            f"{path} is not a run folder: none of config.yaml, metrics.jsonl and trajectories/ can be read"
        )
    return ReportRun(
        label=label,
        path=path,
        config=config,
        manifest=manifest,
        metrics=metrics,
        timings=timings,
        results=_success_so_far(metrics)
        | {name: value for name, value in summary.items() if is_number(value)}
        | _stability(path),
        events=_events(run.events, notes),
        finished=bool(summary),
        data_samples=sorted(set(_samples(manifest))),
        dialogues=choose_dialogues(run.trajectories, notes, dialogues) if dialogues else (),
        notes=notes,
        cell=cell,
    )


def _read(file: Path, parse: Callable[[Path], _T], notes: list[str]) -> _T | None:
    try:
        return parse(file)
    except FileNotFoundError:
        notes.append(
            f"{file.name} is missing" + (": the run has not finished" if file.stem == "summary" else "")
        )
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{file.name} cannot be read: {error}")
    return None


def _rows(file: Path, notes: list[str]) -> list[MetricRow]:
    """The lines of a metrics file, by step. A resumed run may repeat a step: then the later line counts."""
    rows = {int(row["step"]): row for row in _lines(file, notes, ("step",))}
    return [rows[step] for step in sorted(rows)]


def _events(file: Path, notes: list[str]) -> list[MetricRow]:
    """The events in the order in which they happened; most runs have none, and then no file."""
    texts = ("kind", "reason", "action")
    rows = _lines(file, notes, ("step", "kind")) if file.is_file() else ()
    return [{"step": int(row["step"]), **{name: str(row.get(name, "")) for name in texts}} for row in rows]


def _lines(file: Path, notes: list[str], needed: Sequence[str]) -> Iterator[MetricRow]:
    """The lines that are JSON objects with the needed names, of which the step is a number; a note for every other."""
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            row = _mapping(read_json(line))
            if not all(name in row for name in needed) or not is_number(row["step"]):
                raise ValueError
            yield row
        except ValueError:
            notes.append(
                f"{file.name}:{number} is left out: it is not a JSON object with {' and '.join(needed)}"
            )


def _stability(path: Path) -> dict[str, float]:
    """The figures of a run's stability; none before its first evaluation and step, or if its metrics are damaged."""
    try:
        figures = measure(path)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def _success_so_far(metrics: Sequence[MetricRow]) -> dict[str, float]:
    evaluated = [(row["step"], row["eval/success"]) for row in metrics if is_number(row.get("eval/success"))]
    if not evaluated:
        return {}
    found = {"final_success": evaluated[-1][1], "best_success": max(value for _, value in evaluated)}
    return found | ({"cold_start_success": evaluated[0][1]} if evaluated[0][0] == 0 else {})


def is_number(value: Any) -> bool:
    """Whether a curve can show the value: a number that a finite float can hold. NaN is written as null."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _samples(facts: Any) -> Iterator[str]:
    """The sources in the manifest, at any depth, that are marked with ``is_sample``."""
    if not isinstance(facts, dict):
        return
    if facts.get("is_sample") is True:
        yield str(facts.get("source", "the task's embedded examples"))
    for value in facts.values():
        yield from _samples(value)


def _json_mapping(file: Path) -> dict[str, Any]:
    return _mapping(read_json(file.read_bytes()))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, got {type(value).__name__}")
    return value


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
