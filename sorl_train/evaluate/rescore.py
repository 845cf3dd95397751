"""``sorl-eval rescore FOLDER --reward NAME``: score stored answers again with another reward.

FOLDER is the folder of an evaluation, a run folder (whose trajectories are scored), or a file of trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sorl_env.command import Parser, add_json_option, print_json
from sorl_env.data import load_examples
from sorl_env.errors import UserError
from sorl_env.figures import markdown_table
from sorl_env.registry import load_task
from sorl_env.task import Example
from sorl_env.text import quoted
from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import iter_jsonl
from sorl_train.evaluate.answers import REWARDS, score
from sorl_train.evaluate.intervals import mean_interval
from sorl_train.evaluate.journal import read_folder
from sorl_train.evaluate.rows import final_answer
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import saved_config

ABOUT = "Score stored answers again with another reward."
_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Rescored:
    """One answer, its score before, and its score now; answers to one question share its name."""

    group: str
    question: str
    id: str
    answer: str | None
    before: float
    after: float


def rescore_main(argv: Sequence[str]) -> int:
    """Command line of ``sorl-eval rescore``."""
    parser = Parser(prog="sorl-eval rescore", description=ABOUT)
    parser.add_argument("folder", type=Path, help="an evaluation, a run, or a file of a run's trajectories")
    parser.add_argument("--reward", required=True, help=f"one of {', '.join(REWARDS)}")
    parser.add_argument("--out", type=Path, help="default: rescored_REWARD.jsonl beside the answers")
    add_json_option(parser)
    args = parser.parse_args(argv)
    rows = rescore(args.folder.expanduser(), args.reward)
    beside = args.folder if args.folder.is_dir() else args.folder.parent
    out = args.out or beside / f"rescored_{args.reward}.jsonl"
    atomic_write(out, "".join(json.dumps(vars(row), ensure_ascii=False) + "\n" for row in rows))
    if args.json:
        print_json(summarize(rows))
    else:
        print(f"{report(rows, args.reward)}\n\n{out}")
    return 0


def rescore(folder: Path, reward: str) -> list[Rescored]:
    """Score the answers in ``folder`` again, without those that an outage of a tool ended.

    Raises:
        UserError: there is nothing to score, or the reward is unknown or does not apply to the questions.
    """
    if folder.is_dir() and (folder / "results.jsonl").is_file():
        _, results = read_folder(folder)
        return [
            Rescored(
                f"{row.task}, {row.mode}",
                str(row.index),
                f"{row.example_id}/{row.sample}",
                row.answer,
                row.main_score,
                score(reward, row.answer, row.golden_answers, row.options),
            )
            for row in results
            if not row.excluded
        ]
    files, run = _trajectory_files(folder)
    examples = _examples(run)
    rescored = [
        _rescore(trajectory, examples, reward, file)
        for file in files
        for trajectory in iter_jsonl(file)
        if not trajectory.excluded
    ]
    if not rescored:
        raise UserError(f"{folder}: no trajectory to score")
    return rescored


def _rescore(trajectory: Trajectory, examples: Mapping[str, Example], reward: str, file: Path) -> Rescored:
    example = examples.get(trajectory.example_id)
    if example is None:
        raise UserError(
            f"{file}: trajectory {trajectory.id} is of example {quoted(trajectory.example_id)}, which the run's data "
            "no longer holds"
        )
    answer = final_answer(trajectory)
    after = score(reward, answer, example.golden_answers, example.options)
    group = f"{trajectory.task}, {trajectory.split}"
    return Rescored(group, example.id, trajectory.id, answer, trajectory.reward, after)


def _trajectory_files(path: Path) -> tuple[list[Path], Path]:
    """The files of trajectories, and the run folder that they belong to."""
    if path.is_file():
        run = path.parent.parent
        files = [path]
    else:
        inside = path / "trajectories"
        run = path if inside.is_dir() else path.parent
        names = sorted((inside if inside.is_dir() else path).glob("*")) if path.is_dir() else []
        files = [file for file in names if file.name.endswith(_SUFFIXES) and ".tokens." not in file.name]
    if not files:
        raise UserError(
            f"{path} holds no evaluation of sorl-eval (results.jsonl) and no trajectories of a run"
        )
    return files, run


def _examples(run: Path) -> dict[str, Example]:
    """The run's questions by id; they have the gold answers, which trajectories do not."""
    if not (run / "config.yaml").is_file():
        raise UserError(
            f"{run} is no run folder (no config.yaml): the gold answers of its trajectories are not known"
        )
    config = saved_config(run, check=False)
    task = load_task(config.task, **config.task_args)
    evaluation = load_examples(task, config.eval_data or config.data, config.eval.split)
    training = load_examples(task, config.data, config.split)
    return {example.id: example for example in (*evaluation.examples, *training.examples)}


def summarize(rows: Sequence[Rescored]) -> list[dict[str, Any]]:
    """For each group of answers: how many, the mean before and now, and how many scores changed.

    Means and intervals are over questions, so the answers to a question are averaged first.
    """
    groups: dict[str, list[Rescored]] = {}
    questions: dict[str, dict[str, list[Rescored]]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
        questions.setdefault(row.group, {}).setdefault(row.question, []).append(row)
    return [
        {
            "group": name,
            "answers": len(group),
            "questions": len(questions[name]),
            "before": fmean(fmean(row.before for row in own) for own in questions[name].values()),
            "now": mean_interval([fmean(row.after for row in own) for own in questions[name].values()]),
            "changed": sum(row.before != row.after for row in group),
        }
        for name, group in groups.items()
    ]


def report(rows: Sequence[Rescored], reward: str) -> str:
    """`summarize` as a Markdown table."""
    lines = []
    for found in summarize(rows):
        now = found["now"]
        figures = (f"{found['before']:.4f}", f"{now.mean:.4f}", f"[{now.low:.4f}, {now.high:.4f}]")
        lines.append([found["group"], found["answers"], found["questions"], *figures, found["changed"]])
    return markdown_table(["", "answers", "questions", "before", reward, "95%", "changed"], lines, "lrrrrlr")
