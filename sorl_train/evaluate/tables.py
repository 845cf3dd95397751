"""Markdown tables like the paper's Table 1, with its rows, marked as published, beside ours.

Published figures and ours are never ranked together, because the questions, passages and prompts differ.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sorl_env.command import Parser
from sorl_env.errors import UserError
from sorl_env.figures import markdown_table
from sorl_env.text import read_json

ABOUT = "Show several evaluations in one table, beside the rows of the paper's Table 1."
MODE_NAMES = {"direct": "Direct Inference", "cot": "CoT", "rag": "RAG", "agent": "agent"}
_MARKS = {"in": "†", "out": "*", "": ""}

Summary = Mapping[str, Any]  # the contents of summary.json
Column = Mapping[str, Any]  # a benchmark: name, tasks, domain (see published.json)


@functools.lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """The paper's figures and their source."""
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    )
    return content


def table_main(argv: Sequence[str]) -> int:
    """Command line of ``sorl-eval table``: several evaluations in one table."""
    parser = Parser(prog="sorl-eval table", description=ABOUT)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that sorl-eval wrote")
    print(tables([read_summary(folder) for folder in parser.parse_args(argv).folders]))
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


def tables(summaries: Sequence[Summary]) -> str:
    """A table of the paper's benchmarks, with its published rows, and one of all other tasks."""
    paper = published()["columns"]
    of_paper = {task for column in paper for task in column["tasks"]}
    tasks = dict.fromkeys(entry["task"] for summary in summaries for entry in summary["entries"])
    others = [{"name": task, "tasks": [task], "domain": ""} for task in tasks if task not in of_paper]
    found = [_table(others, summaries, with_published=False)] if others else []
    if len(others) < len(tasks):
        found.insert(0, _table(paper, summaries, with_published=True))
    return "\n\n".join(found)


def _table(columns: Sequence[Column], summaries: Sequence[Summary], *, with_published: bool) -> str:
    head = ["Model", *(f"{column['name']}{_MARKS[column['domain']]}" for column in columns), "Avg."]
    rows: list[list[str]] = []
    for group in published()["groups"]:
        if with_published:
            rows.append([f"*{group['name']}*", *[""] * (len(head) - 1)])
            for row in group["rows"]:
                figures = (*row["values"], row["average"])
                rows.append([f"{row['name']}, published", *(f"{figure:.2f}" for figure in figures)])
        for summary in summaries:
            rows += [line for mode in group["modes"] if (line := _line(columns, summary, mode))]
    notes = ["Ours: percent (exact match, or choice accuracy), 95% interval over questions."]
    if with_published:
        notes.insert(0, "† in-domain, * out-of-domain benchmarks.")
        notes.insert(1, f"Rows marked published: {published()['source']}. All others are ours.")
    shown = {task for column in columns for task in column["tasks"]}
    for summary in summaries:
        notes += [_about(entry, summary["label"]) for entry in summary["entries"] if entry["task"] in shown]
    text = markdown_table(head, rows, "l" + "r" * (len(head) - 1))
    return "\n".join([text, "", *(f"- {note}" for note in notes)])


def _line(columns: Sequence[Column], summary: Summary, mode: str) -> list[str] | None:
    """The figures of a policy in one mode, and their average if it has all; None if it has none in these columns."""
    cells: list[str] = []
    means: list[float] = []
    for column in columns:
        cell = "-"
        for entry in summary["entries"]:
            metric = entry["metrics"][entry["main"]]
            # no mean: a tool failed in every question
            if entry["task"] in column["tasks"] and entry["mode"] == mode and metric["mean"] is not None:
                mean, low, high = (100 * metric[name] for name in ("mean", "low", "high"))
                cell = f"{mean:.2f} [{low:.1f}, {high:.1f}]"
                means.append(mean)
        cells.append(cell)
    average = f"{fmean(means):.2f}" if len(means) == len(columns) else "-"
    return [f"{summary['label']} ({MODE_NAMES[mode]})", *cells, average] if means else None


def _about(entry: Mapping[str, Any], label: str) -> str:
    of = " of the task's embedded sample, which is not the benchmark" if entry["is_sample"] else ""
    excluded = f", {entry['excluded']} more left out because a tool failed" if entry["excluded"] else ""
    return f"{label}, {entry['task']}, {entry['mode']}: {entry['questions']} questions{of}{excluded}."
