"""Tables like the paper's Table 1, with its rows, marked as published, beside ours.

Published figures and ours are never ranked together, because the questions, passages and prompts differ.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sorl_env.command import Parser, add_json_option, print_json
from sorl_env.errors import UserError
from sorl_env.figures import markdown_table
from sorl_env.text import read_json

ABOUT = "Show several evaluations in one table, beside the rows of the paper's Table 1."
MODE_NAMES = {"direct": "Direct Inference", "cot": "CoT", "rag": "RAG", "agent": "agent"}
_MARKS = {"in": "†", "out": "*", "": ""}
_TEX_MARKS = {
    "in": r"\textsuperscript{\textdagger}",
    "out": r"\textsuperscript{\textasteriskcentered}",
    "": "",
}


Column = Mapping[str, Any]  # a benchmark: name, tasks, domain (see published.json)


class Cell(NamedTuple):
    """A figure in percent; only ours have intervals."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A policy's figure in each column and last their average; None where it has none."""

    name: str
    cells: tuple[Cell | None, ...]
    published: bool = False


@dataclass(frozen=True)
class Table:
    """The columns, and the lines by the name of their group; beside no published rows ours need no name."""

    columns: tuple[Column, ...]
    groups: tuple[tuple[str, tuple[Line, ...]], ...]
    notes: tuple[str, ...]


@functools.lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """The paper's figures and their source."""
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    )
    return content


def make_tables(summaries: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One table of the paper's benchmarks, with its published rows, and one of all other tasks.

    Args:
        summaries: the contents of ``summary.json`` of each evaluation.
    """
    paper = published()["columns"]
    of_paper = {task for column in paper for task in column["tasks"]}
    tasks = list(dict.fromkeys(entry["task"] for summary in summaries for entry in summary["entries"]))
    others = [{"name": task, "tasks": [task], "domain": ""} for task in tasks if task not in of_paper]
    tables = []
    if any(task in of_paper for task in tasks):
        tables.append(_table(paper, summaries, with_published=True))
    if others:
        tables.append(_table(others, summaries, with_published=False))
    return tables


def table_main(argv: Sequence[str]) -> int:
    """Command line of ``sorl-eval table``: several evaluations in one table."""
    parser = Parser(prog="sorl-eval table", description=ABOUT)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that sorl-eval wrote")
    parser.add_argument("--latex", action="store_true", help="print LaTeX instead of Markdown")
    add_json_option(parser)
    args = parser.parse_args(argv)
    tables = make_tables([read_summary(folder) for folder in args.folders])
    if args.json:
        print_json(tables)
        return 0
    print(latex(tables) if args.latex else markdown(tables), end="")
    return 0


def read_summary(folder: Path) -> dict[str, Any]:
    """The contents of ``summary.json`` in a folder. Raises ``UserError`` if there is none."""
    file = folder.expanduser() / "summary.json"
    try:
        content = read_json(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file}: it is damaged ({error}); evaluate again") from error
    if not isinstance(content, dict) or "entries" not in content:  # a run folder has another summary.json
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
            Line(
                row["name"], tuple(Cell(value) for value in (*row["values"], row["average"])), published=True
            )
            for row in group["rows"]
            if with_published
        ]
        for summary in summaries:
            lines += [line for mode in group["modes"] if (line := _line(columns, summary, mode))]
        if lines:
            groups.append((group["name"] if with_published else "", tuple(lines)))
    return Table(tuple(columns), tuple(groups), tuple(_notes(columns, summaries, with_published)))


def _line(columns: Sequence[Column], summary: Mapping[str, Any], mode: str) -> Line | None:
    """The figures of a policy in one mode; None if it has none in these columns."""
    cells = [_find_cell(column, summary, mode) for column in columns]
    present = [cell.mean for cell in cells if cell is not None]
    if not present:
        return None
    average = Cell(fmean(present)) if len(present) == len(columns) else None
    return Line(f"{summary['label']} ({MODE_NAMES[mode]})", (*cells, average))


def _find_cell(column: Column, summary: Mapping[str, Any], mode: str) -> Cell | None:
    for entry in summary["entries"]:
        metric = entry["metrics"][entry["main"]]
        # no mean: a tool failed in every question
        if entry["task"] in column["tasks"] and entry["mode"] == mode and metric["mean"] is not None:
            return Cell(*(100 * metric[name] for name in ("mean", "low", "high")))
    return None


def _notes(
    columns: Sequence[Column], summaries: Sequence[Mapping[str, Any]], with_published: bool
) -> list[str]:
    notes: list[str] = []
    if with_published:
        notes.append("† in-domain, * out-of-domain benchmarks.")
        notes.append(f"Rows marked published: {published()['source']}. All others are ours.")
    notes.append("Ours: percent (exact match, or choice accuracy), 95% interval over questions.")
    shown = {task for column in columns for task in column["tasks"]}
    for summary in summaries:
        notes += [_about(entry, summary) for entry in summary["entries"] if entry["task"] in shown]
    return notes


def _about(entry: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    of = " of the task's embedded sample, which is not the benchmark" if entry["is_sample"] else ""
    excluded = f", {entry['excluded']} more left out because a tool failed" if entry["excluded"] else ""
    return (
        f"{summary['label']}, {entry['task']}, {entry['mode']}: {entry['questions']} questions{of}{excluded}."
    )


def markdown(tables: Sequence[Table]) -> str:
    """The tables in Markdown."""
    parts = []
    for table in tables:
        head = ["Model", *(f"{column['name']}{_MARKS[column['domain']]}" for column in table.columns), "Avg."]
        rows: list[list[str]] = []
        for name, lines in table.groups:
            if name:
                rows.append([f"*{name}*"] + [""] * (len(head) - 1))
            for line in lines:
                mark = ", published" if line.published else ""
                rows.append(
                    [line.name + mark, *(_cell(cell, " [{:.1f}, {:.1f}]", "-") for cell in line.cells)]
                )
        text = markdown_table(head, rows, "l" + "r" * (len(head) - 1))
        parts.append("\n".join([text, "", *(f"- {note}" for note in table.notes)]))
    return "\n\n".join(parts) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """The tables as LaTeX ``tabular`` with booktabs rules, as in the paper."""
    return "\n\n".join(_latex(table) for table in tables) + "\n"


def _latex(table: Table) -> str:
    width = len(table.columns) + 2
    head = " & ".join(f"{_tex(column['name'])}{_TEX_MARKS[column['domain']]}" for column in table.columns)
    lines = [
        r"\begin{tabular}{l" + "c" * (width - 1) + "}",
        r"\toprule",
        rf"\textbf{{Model}} & {head} & \textbf{{Avg.}} \\",
    ]
    for name, rows in table.groups:
        lines.append(r"\midrule")
        if name:
            lines += [rf"\multicolumn{{{width}}}{{c}}{{\textit{{{_tex(name)}}}}} \\", r"\midrule"]
        for row in rows:
            mark = r" \textit{(published)}" if row.published else ""
            figures = [_cell(cell, r" {{\scriptsize [{:.1f}, {:.1f}]}}", "--") for cell in row.cells]
            lines.append(" & ".join([f"{_tex(row.name)}{mark}", *figures]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines)


def _cell(cell: Cell | None, interval: str, missing: str) -> str:
    if cell is None:
        return missing
    return f"{cell.mean:.2f}" + ("" if cell.low is None else interval.format(cell.low, cell.high))


_TEX = {character: f"\\{character}" for character in "_&%#$"} | {"~": r"\textasciitilde{}", "^": r"\^{}"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
