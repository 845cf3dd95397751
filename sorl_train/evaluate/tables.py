"""Tables in the shape of the paper's Table 1, its published rows beside ours and marked as published.

Published figures and ours are never ranked together: questions, passages and prompts differ.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sorl_env.command import Parser
from sorl_env.errors import UserError
from sorl_env.text import read_json

ABOUT = "Several evaluations in one table, beside the published rows of the paper's Table 1."
MODE_NAMES = {"direct": "Direct Inference", "cot": "CoT", "rag": "RAG", "agent": "agent"}
_MARKS = {"in": "†", "out": "*", "": ""}
_TEX_MARKS = {
    "in": r"\textsuperscript{\textdagger}",
    "out": r"\textsuperscript{\textasteriskcentered}",
    "": "",
}


@dataclass(frozen=True)
class Column:
    """A benchmark: the tasks that are it, and whether training data of it was seen (``in``) or not (``out``)."""

    name: str
    tasks: tuple[str, ...]
    domain: str = ""


@dataclass(frozen=True)
class Line:
    """A row of figures in percent, None where there is none; intervals for ours."""

    name: str
    values: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...]
    average: float | None
    published: bool = False


@dataclass(frozen=True)
class Table:
    """Columns, and lines under their group's name."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[str, tuple[Line, ...]], ...]
    notes: tuple[str, ...]


@functools.lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """The paper's figures and where they stand."""
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    )
    return content


def make_tables(summaries: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The paper's benchmarks in one table with its published rows, all other tasks in a second one.

    ``summaries`` are contents of ``summary.json``, one a policy.
    """
    paper = [Column(c["name"], tuple(c["tasks"]), c["domain"]) for c in published()["columns"]]
    of_paper = {task for column in paper for task in column.tasks}
    tasks = list(dict.fromkeys(entry["task"] for summary in summaries for entry in summary["entries"]))
    others = [Column(task, (task,)) for task in tasks if task not in of_paper]
    tables = []
    if any(task in of_paper for task in tasks):
        tables.append(_table(paper, summaries, with_published=True))
    if others:
        tables.append(_table(others, summaries, with_published=False))
    return tables


def table_main(argv: Sequence[str]) -> int:
    """Command line of ``sorl-eval table``: several evaluations in one table."""
    parser = Parser(prog="sorl-eval table", description=ABOUT, allow_abbrev=False)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that sorl-eval wrote")
    parser.add_argument("--latex", action="store_true", help="LaTeX in place of Markdown")
    args = parser.parse_args(argv)
    tables = make_tables([read_summary(folder) for folder in args.folders])
    print(latex(tables) if args.latex else markdown(tables), end="")
    return 0


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a folder. Raises ``UserError`` where there is none."""
    file = folder.expanduser() / "summary.json"
    try:
        content = read_json(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file}: it is damaged ({error}); evaluate again") from error
    if not isinstance(content, dict) or "entries" not in content:  # a run folder has a summary of its own
        raise UserError(
            f"{folder} holds no finished evaluation: give a folder where sorl-eval ran to its end"
        )
    return content


def _table(
    columns: Sequence[Column], summaries: Sequence[Mapping[str, Any]], *, with_published: bool
) -> Table:
    groups = []
    for group in published()["groups"]:
        lines = [
            Line(row["name"], tuple(row["values"]), (None,) * len(columns), row["average"], published=True)
            for row in group["rows"]
            if with_published
        ]
        for summary in summaries:
            lines += [line for mode in group["modes"] if (line := _line(columns, summary, mode))]
        if lines:
            groups.append((group["name"], tuple(lines)))
    return Table(tuple(columns), tuple(groups), tuple(_notes(columns, summaries, with_published)))


def _line(columns: Sequence[Column], summary: Mapping[str, Any], mode: str) -> Line | None:
    """A policy's figures in one mode; None where it has none in these columns."""
    values: list[float | None] = []
    intervals: list[tuple[float, float] | None] = []
    for column in columns:
        entry = next((e for e in summary["entries"] if e["task"] in column.tasks and e["mode"] == mode), None)
        metric = entry["metrics"][entry["main"]] if entry else None
        if metric is None or metric["mean"] is None:  # every question was left out for an outage
            values.append(None)
            intervals.append(None)
        else:
            values.append(100 * metric["mean"])
            intervals.append((100 * metric["low"], 100 * metric["high"]))
    present = [value for value in values if value is not None]
    if not present:
        return None
    average = fmean(present) if len(present) == len(columns) else None
    name = f"{summary['label']} ({MODE_NAMES[mode]})"
    return Line(name, tuple(values), tuple(intervals), average)


def _notes(
    columns: Sequence[Column], summaries: Sequence[Mapping[str, Any]], with_published: bool
) -> list[str]:
    notes: list[str] = []
    if with_published:
        notes.append("† in-domain, * out-of-domain benchmarks.")
        notes.append(f"Rows marked published: {published()['source']}. All others are ours.")
    notes.append("Ours: percent (exact match, or choice accuracy), 95% bootstrap interval over questions.")
    shown = {task for column in columns for task in column.tasks}
    for summary in summaries:
        notes += [_about(entry, summary) for entry in summary["entries"] if entry["task"] in shown]
    return notes


def _about(entry: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    of = " of the task's embedded sample, which is not the benchmark" if entry["is_sample"] else ""
    excluded = f", {entry['excluded']} more left out for outages" if entry["excluded"] else ""
    return (
        f"{summary['label']}, {entry['task']}, {entry['mode']}: {entry['questions']} questions{of}{excluded}."
    )


def markdown(tables: Sequence[Table]) -> str:
    """The tables for a README."""
    parts = []
    for table in tables:
        head = ["Model", *(f"{column.name}{_MARKS[column.domain]}" for column in table.columns), "Avg."]
        lines = [_pipes(head), _pipes(["---"] + ["---:"] * (len(head) - 1))]
        for name, rows in table.groups:
            lines.append(_pipes([f"*{name}*"] + [""] * (len(head) - 1)))
            for row in rows:
                cells = [_cell(*pair) for pair in zip(row.values, row.intervals, strict=True)]
                mark = ", published" if row.published else ""
                lines.append(_pipes([f"{_plain(row.name)}{mark}", *cells, _cell(row.average, None)]))
        parts.append("\n".join([*lines, "", *(f"- {note}" for note in table.notes)]))
    return "\n\n".join(parts) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.1f}, {interval[1]:.1f}]"


def latex(tables: Sequence[Table]) -> str:
    """The tables as ``tabular``, for booktabs and multirow, as the paper sets its own."""
    return "\n\n".join(_latex(table) for table in tables) + "\n"


def _latex(table: Table) -> str:
    width = len(table.columns) + 2
    head = " & ".join(f"{_tex(column.name)}{_TEX_MARKS[column.domain]}" for column in table.columns)
    lines = [
        r"\begin{tabular}{l" + "c" * (width - 1) + "}",
        r"\toprule",
        rf"\textbf{{Model}} & {head} & \textbf{{Avg.}} \\",
    ]
    for name, rows in table.groups:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{c}}{{\textit{{{_tex(name)}}}}} \\", r"\midrule"]
        for row in rows:
            cells = [_tex_cell(*pair) for pair in zip(row.values, row.intervals, strict=True)]
            mark = r" \textit{(published)}" if row.published else ""
            cells = [f"{_tex(row.name)}{mark}", *cells, _tex_cell(row.average, None)]
            lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines)


def _tex_cell(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "--"
    spread = "" if interval is None else rf" {{\scriptsize [{interval[0]:.1f}, {interval[1]:.1f}]}}"
    return f"{value:.2f}{spread}"


_TEX = {character: f"\\{character}" for character in "_&%#$"} | {"~": r"\textasciitilde{}", "^": r"\^{}"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
