"""The figures of an evaluation, and tables of several like the paper's Table 1, with its published rows beside ours.

Published figures and ours are never ranked together, because the questions, passages and prompts differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sorl_env.commands.command import Parser
from sorl_env.errors import UserError
from sorl_env.text import markdown_table, read_json
from sorl_train.evaluate.answers import ks, pass_at_k
from sorl_train.evaluate.intervals import mean_interval
from sorl_train.evaluate.results import EvalResult


def summarize(results: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """One entry per task and mode, in the order of the results."""
    return [_entry(task, mode, group) for (task, mode), group in by_task_and_mode(results).items()]


def by_task_and_mode(results: Sequence[EvalResult]) -> dict[tuple[str, str], list[EvalResult]]:
    """The results of each task and mode."""
    groups: dict[tuple[str, str], list[EvalResult]] = {}
    for result in results:
        groups.setdefault((result.task, result.mode), []).append(result)
    return groups


def _entry(task: str, mode: str, rows: Sequence[EvalResult]) -> dict[str, Any]:
    """All intervals are over questions, so the samples of a question are averaged first."""
    counted = [row for row in rows if not row.excluded]
    questions: dict[int, list[EvalResult]] = {}
    for row in counted:
        questions.setdefault(row.index, []).append(row)
    groups = list(questions.values())
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    # questions with options have other scores than open ones
    scored = {name: [group for group in groups if name in group[0].scores] for name in names}
    metrics = {
        name: _interval([fmean(row.scores[name] for row in group) for group in those])
        for name, those in scored.items()
    }
    if mode == "agent":
        metrics["reward"] = _interval([fmean(row.reward or 0.0 for row in group) for group in groups])
    turns = sum(len(row.turns) for row in counted)
    searched = [row.answer_in_retrieved for row in counted if row.answer_in_retrieved is not None]
    return {
        "task": task,
        "mode": mode,
        "main": names[0],
        "questions": len(groups),
        "samples": max((len(group) for group in groups), default=0),
        "excluded": len(rows) - len(counted),
        "metrics": metrics,
        "pass_at_k": _pass_at_k(scored[names[0]], names[0]),
        "answered": _mean([row.answer is not None for row in counted]),
        "valid_turn_rate": sum(row.valid_turns for row in counted) / turns if turns else None,
        "turns": _mean([len(row.turns) for row in counted]),
        "searches": _mean([row.searches for row in counted]),
        "answer_in_retrieved": _mean(searched),
        "stop_reasons": dict(sorted(Counter(row.stop_reason for row in rows).items())),
        "tokens": {
            name: _mean([getattr(row, f"{name}_tokens") for row in counted])
            for name in ("prompt", "action", "observation")
        },
    }


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    found = dataclasses.asdict(mean_interval(values))
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def _pass_at_k(groups: Sequence[Sequence[EvalResult]], name: str) -> dict[str, dict[str, float | None]]:
    samples = max((len(group) for group in groups), default=0)
    if samples < 2:
        return {}
    whole = [group for group in groups if len(group) == samples]
    right = [sum(row.scores[name] >= 1.0 for row in group) for group in whole]
    return {str(k): _interval([pass_at_k(samples, count, k) for count in right]) for k in ks(samples)}


def _mean(values: Sequence[float]) -> float | None:
    return float(fmean(values)) if values else None


ABOUT = "Show several evaluations in one table, beside the rows of the paper's Table 1."
MODE_NAMES = {"direct": "Direct Inference", "cot": "CoT", "rag": "RAG", "agent": "agent"}
_MARKS = {"in": "†", "out": "*", "": ""}

Summary = Mapping[str, Any]  # the contents of summary.json
Column = Mapping[str, Any]  # a benchmark: name, tasks, domain (see published.json)


@functools.lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """The paper's figures and their source."""
    return dict(read_json(Path(__file__).with_name("published.json").read_bytes()))


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
