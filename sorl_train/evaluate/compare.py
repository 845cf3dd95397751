"""``sorl-eval compare A B``: the paired difference of two evaluations, over the questions that both have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sorl_env.commands.command import Parser, add_json_option, print_json, say
from sorl_env.errors import UserError, did_you_mean
from sorl_env.text import markdown_table
from sorl_train.evaluate.intervals import SIGNIFICANT, Paired, paired
from sorl_train.evaluate.results import EvalResult, read_folder
from sorl_train.evaluate.runner import MODES
from sorl_train.evaluate.summary import by_task_and_mode

ABOUT = "Compare two evaluations over the questions that both have, and list the questions gained and lost."
SHOWN = 5  # of the questions gained, and of those lost
Question = tuple[str, str, int]  # id, text, and a number that tells apart what has the same id and text
Answers = dict[Question, list[EvalResult]]
Groups = dict[tuple[str, str], Answers]  # the answers to each question, by task and mode


@dataclass(frozen=True)
class Comparison:
    """The result for one task and mode, and the questions (id, text) whose score rose or fell from A to B."""

    task: str
    mode_a: str
    mode_b: str
    metric: str
    result: Paired
    gained: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, str], ...]


def compare_main(argv: Sequence[str]) -> int:
    """Command line of ``sorl-eval compare``."""
    parser = Parser(prog="sorl-eval compare", description=ABOUT)
    add = parser.add_argument
    add("a", help="folder of an evaluation; FOLDER:MODE takes one of its modes")
    add("b", help="folder of the evaluation to compare it with")
    add("--metric", help="em, f1, subem, choice or reward (default: each task's main score)")
    add_json_option(parser)
    args = parser.parse_args(argv)
    comparisons = compare(args.a, args.b, args.metric)
    if args.json:
        print_json(comparisons)
    else:
        print(report(comparisons))
    return 0


def compare(a: str, b: str, metric: str | None = None) -> list[Comparison]:
    """Compare two folders, task by task and mode by mode; ``FOLDER:MODE`` on both sides compares two modes. A question
    counts only if both sides have it and no tool failed on either. Raises ``UserError`` for a folder without an
    evaluation, no question in common, or an unknown metric."""
    (label_a, groups_a, mode_a), (label_b, groups_b, mode_b) = _read_side(a), _read_side(b)
    if (mode_a is None) != (mode_b is None):
        raise UserError(f"{a} and {b}: name a mode on both sides, or on neither")
    found = []
    for (task, mode), before in groups_a.items():
        other = mode_b or mode
        if mode_a in (None, mode) and (task, other) in groups_b:
            found += _compare(before, groups_b[task, other], task, mode, other, metric)
    if not found:
        have = [
            ", ".join(f"{task} ({mode})" for task, mode in groups) or "nothing"
            for groups in (groups_a, groups_b)
        ]
        raise UserError(
            f"{a} and {b} share no question: {label_a} has {have[0]} against {label_b} has {have[1]}"
        )
    return found


def _read_side(text: str) -> tuple[str, Groups, str | None]:
    folder, colon, mode = text.rpartition(":")
    if not colon or mode not in MODES:
        folder, mode = text, ""
    settings, results = read_folder(path := Path(folder).expanduser())
    if not (path / "summary.json").is_file():
        why = "questions with short dialogues come first, which is a bias: finish it with the command that began it"
        say("sorl-eval", f"{folder} holds an unfinished evaluation, in which {why}")
    groups = {name: _answers(group) for name, group in by_task_and_mode(results).items()}
    return str(settings["label"]), groups, mode or None


def _answers(results: Sequence[EvalResult]) -> Answers:
    """Results by question. Id and text identify a question across folders, because ids of generated questions are
    places in a list, which another seed fills with other ones. Questions that share both are numbered in order."""
    names: dict[int, Question] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for index, example_id, text in sorted({(r.index, r.example_id, r.question) for r in results}):
        names[index] = (example_id, text, seen[example_id, text])
        seen[example_id, text] += 1
    found: Answers = {}
    for result in results:
        if not result.excluded:
            found.setdefault(names[result.index], []).append(result)
    return found


def _compare(
    before: Answers, after: Answers, task: str, mode_a: str, mode_b: str, metric: str | None
) -> list[Comparison]:
    shared = [question for question in before if question in after]
    if not shared:
        return []
    name = metric or next(iter(before[shared[0]][0].scores))
    first = [fmean(_value(result, name) for result in before[question]) for question in shared]
    second = [fmean(_value(result, name) for result in after[question]) for question in shared]
    changes = list(zip(shared, first, second, strict=True))

    def texts(sign: int) -> tuple[tuple[str, str], ...]:
        return tuple((name, text) for (name, text, _), x, y in changes if sign * (y - x) > 0)

    return [Comparison(task, mode_a, mode_b, name, paired(first, second), texts(1), texts(-1))]


def _value(row: EvalResult, metric: str) -> float:
    if metric == "reward" and row.reward is not None:
        return row.reward
    if metric not in row.scores:
        known = [*row.scores, *(["reward"] if row.reward is not None else [])]
        raise UserError(f"rows of task {row.task} have no metric {metric!r}. {did_you_mean(metric, known)}")
    return row.scores[metric]


def report(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table, then for each of its rows a verdict and the first questions that changed."""
    rows: list[list[Any]] = []
    details: list[str] = []
    for found in comparisons:
        result, difference = found.result, found.result.difference
        mode = found.mode_a if found.mode_a == found.mode_b else f"{found.mode_a} / {found.mode_b}"
        percents = [f"{100 * mean:.2f}" for mean in (result.mean_a, result.mean_b)]
        percents.append(f"{100 * difference.mean:+.2f}")
        interval = f"[{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"
        tests = [f"{result.p:.2g}", result.test, result.gained, result.lost]
        rows.append([found.task, mode, found.metric, result.questions, *percents, interval, *tests])
        details += ["", f"{found.task}, {mode}: {verdict(result)}"]
        for word, questions in (("gained", found.gained), ("lost", found.lost)):
            details += [f"  {word}: {name}  {text}" for name, text in questions[:SHOWN]]
            if len(questions) > SHOWN:
                details.append(f"  .. and {len(questions) - SHOWN} more {word}: --json has all")
    heads = "task, mode, metric, questions, A, B, B - A, 95%, p, test, gained, lost".split(", ")
    return "\n".join([markdown_table(heads, rows, "lllrrrrlrlrr"), *details])


def verdict(result: Paired) -> str:
    """The result in words."""
    if result.better is None:
        needs = f"an interval without 0 and a p below {SIGNIFICANT:.2g}"
        return f"no difference that these questions could show; that would take {needs}."
    side = "above" if result.better == "B" else "below"
    return f"{result.better} is better: the interval of the difference is {side} 0, and p is {result.p:.2g}."
