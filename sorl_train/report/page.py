"""A self-contained page: the figures that a report draws, their data, and the template with styles and scripts inline.

Text that comes from a run is escaped by Jinja, or set as plain text by the scripts. The page's content security policy
lets it load nothing, and run no scripts but its own, which it names by their hashes.

Sections and figures are listed in ``assets/figures.yaml``. A metric that no figure draws gets a figure of its own in
the last section, so what only some runs log, such as the age of replayed trajectories, needs no entry there.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jinja2
import yaml

from sorl_env.text import duration
from sorl_train.report.groups import Group, choices, setting_text
from sorl_train.report.run import MetricRow, ReportRun, is_number
from sorl_train.run.alarm import ALARM


@dataclass(frozen=True)
class Figure:
    """One plot over training steps.

    Attributes:
        about: what it shows or what to look for, in a sentence.
        metrics: names with their labels; only the first is shown where several groups share a plot.
        axis: ``share`` runs from 0 to 1; ``log`` interrupts a line where a value is not positive.
        marks: ``alarms`` marks the steps with a collapse alarm; ``delta`` draws ``loss.clip_bias_delta``, the norm
            above which steps are scaled down, if it is the same in all runs that normalize.
    """

    title: str
    about: str
    metrics: Mapping[str, str]
    axis: Literal["linear", "log", "share"] = "linear"
    marks: Literal["", "alarms", "delta"] = ""

    @property
    def id(self) -> str:
        """Of its element in the page."""
        return self.title.lower().replace(" ", "-").replace("/", "-")


@dataclass(frozen=True)
class Section:
    """Figures under one heading. In ``outcome`` the line of a group keeps the last value of a run that ended early:
    otherwise its median would rise when a collapsed run is stopped."""

    name: str
    title: str
    about: str
    figures: tuple[Figure, ...]


_ASSETS = Path(__file__).resolve().parent / "assets"
SECTIONS = tuple(
    Section(**{**section, "figures": tuple(Figure(**figure) for figure in section["figures"])})
    for section in yaml.safe_load((_ASSETS / "figures.yaml").read_text(encoding="utf-8"))
)

# The parts of a step in timings.jsonl, which do not overlap.
STAGES = ("rollout", "log_probs", "update", "eval", "checkpoint")
FEW = 8  # groups that have a colour and a switch each; where there are more, settings choose them


def chart_data(runs: Sequence[ReportRun], groups: Sequence[Group], names: Sequence[str]) -> dict[str, Any]:
    """What the page's script draws: figures, groups, and for each run its steps and the values of each metric.

    ``more`` are figures of one metric each, for the metrics that no other figure shows.
    """
    rows = [_joined(run) for run in runs]
    known = {name for own in rows for row in own for name, value in row.items() if is_number(value)}
    metrics = sorted(known - {"step"})
    figures = [
        _as_json(figure, section.name)
        for section in SECTIONS
        for figure in section.figures
        if any(name in metrics for name in figure.metrics)
    ]
    shown = {name for figure in figures for name in figure["metrics"]}
    more = [_as_json(Figure(name, "", {name: ""}), "more") for name in metrics if name not in shown]
    return {
        "figures": figures,
        "more": more,
        "choices": choices(groups) if len(groups) > FEW else {},
        "groups": [
            {
                "label": group.label,
                "members": group.members,
                "settings": {name: setting_text(value) for name, value in group.settings.items()},
            }
            for group in groups
        ],
        "runs": [
            {
                "label": name,
                "finished": run.finished,
                "delta": run.config.get("loss.clip_bias_delta") if run.normalizes else None,
                "alarms": [event["step"] for event in run.events if event["kind"] == ALARM],
                "steps": [row["step"] for row in own],
                "values": {metric: _column(own, metric) for metric in metrics},
            }
            for run, name, own in zip(runs, names, rows, strict=True)
        ],
    }


def stage_seconds(run: ReportRun) -> dict[str, float]:
    """Seconds of the whole run by stage, longest first; ``other`` is the time of the steps outside all stages."""
    totals = {stage: _total(run.timings, f"time/{stage}_s") for stage in STAGES}
    totals["other"] = _total(run.timings, "time/step_s") - sum(totals.values())
    longest_first = sorted(totals.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in longest_first if seconds > 0}


def _joined(run: ReportRun) -> list[MetricRow]:
    rows: dict[int, dict[str, Any]] = {}
    for row in (*run.metrics, *run.timings):
        rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _as_json(figure: Figure, section: str) -> dict[str, Any]:
    return {"id": figure.id, "section": section, **dataclasses.asdict(figure)}


def _column(rows: Sequence[MetricRow], name: str) -> list[float | None]:
    """A metric at each step, with six digits, which is all a plot can show; None where it has no value."""
    return [float(f"{row[name]:.6g}") if is_number(row.get(name)) else None for row in rows]


def _total(rows: Sequence[MetricRow], name: str) -> float:
    return sum(row[name] for row in rows if is_number(row.get(name)))


def render_page(template: str, *, styles: Sequence[str], scripts: Sequence[str], **context: Any) -> str:
    """The page as text; ``styles`` and ``scripts`` are names of assets, in the order in which they apply."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # curves keep their order
    environment.filters |= {"seconds": duration, "pretty": partial(json.dumps, indent=2, ensure_ascii=False)}
    texts = [_script(name) for name in scripts]
    return environment.get_template(template).render(
        styles=[_asset(name) for name in styles],
        scripts=texts,
        script_hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in texts),
        **context,
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


def _script(name: str) -> str:
    license_file = _ASSETS / f"{name.partition('.')[0]}.LICENSE"
    notice = f"/* {license_file.read_text(encoding='utf-8').strip()} */\n" if license_file.is_file() else ""
    return notice + _asset(name)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
