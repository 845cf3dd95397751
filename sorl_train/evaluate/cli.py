"""``sorl-eval MODEL --task NAME ..``: a policy on tasks, in four modes, with intervals and tables.

``sorl-eval compare A B`` and ``sorl-eval table FOLDER ..`` read what it wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.commands.command import add_json_option, print_json, run_command, say, whole
from sorl_env.envs.prompts import check_prompts
from sorl_env.envs.text_env import TextEnv, format_of
from sorl_env.errors import UserError, install_command

try:
    from sorl_train.evaluate.arguments import (
        add_options,
        find_source,
        make_envs,
        make_parser,
        make_policy,
        policy_facts,
        rollout_settings,
    )
except ModuleNotFoundError as missing:  # the core alone is installed
    raise SystemExit(f"sorl-eval needs the package {missing.name!r}: {install_command('train')}") from missing

from sorl_tools.progress import Progress
from sorl_train.evaluate.compare import compare_main
from sorl_train.evaluate.find_policy import PolicySource
from sorl_train.evaluate.results import EvalResult, EvalResultsFile, Job
from sorl_train.evaluate.runner import Policy, check_modes, check_search, plan_jobs, run_evaluation
from sorl_train.evaluate.summary import summarize, table_main, tables
from sorl_train.rollout.environments import env_facts
from sorl_train.run.files import FolderLock, atomic_write

EXAMPLES = """\
  sorl-eval RUN --mode direct cot rag agent         a run's best checkpoint on the run's own task
  sorl-eval MODEL --task medqa nq --data medqa=FILE nq=FILE --search.corpus PASSAGES
  sorl-eval --endpoint URL --model_name NAME --tokenizer MODEL --task nq --search.url URL
commands on its results, each with a --help of its own:
  sorl-eval compare A B                             paired interval and test, questions gained and lost
  sorl-eval table FOLDER ..                         several policies beside the paper's published rows
"""
COMMANDS = {"compare": compare_main, "table": table_main}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 0 done, 1 questions were left out for outages, 2 wrong usage, 130 interrupted."""
    again = "interrupted; the same command goes on where this one stopped"
    return run_command("sorl-eval", _run, argv, interrupted=again)


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    return evaluate(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "sorl-eval",
        usage="sorl-eval [MODEL] [OPTION ..]",
        description="Evaluate a policy on tasks in four modes: figures with intervals, and tables.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("model", nargs="?", help="a model folder, checkpoint, run folder or hub name (or --model)")
    add("--model", dest="named_model", help=argparse.SUPPRESS)  # as in the commands whose text is a question
    add("--task", nargs="+", default=[], metavar="NAME", help="default: the run's own task")
    modes = "some of direct (only an answer), cot (thinks first), rag (one search before), agent (with tools; default)"
    add("--mode", nargs="+", default=["agent"], metavar="MODE", help=modes)
    add("--limit", type=whole(1), metavar="N", help="a seeded sample of N questions per task")
    answers = "answers per question, for pass@k (default: 1)"
    add("--samples", type=whole(1), default=1, metavar="N", help=answers)
    where = "folder (default: RUN/evaluation, RUN/evaluation-STEP, or runs/evaluations/MODEL)"
    add("--out", type=Path, help=where)
    add("--label", help="the policy's name in tables")
    add("--quiet", action="store_true", help="show no progress")
    add_json_option(parser)
    add_options(parser)
    return parser


def evaluate(args: argparse.Namespace) -> int:
    """Answer all questions that the folder does not hold yet, then write the summary and the table."""
    args.mode = list(dict.fromkeys(args.mode))
    check_modes(args.mode)
    if args.samples > 1 and args.temperature is None:
        args.temperature = 1.0  # n greedy samples would be the same one n times
    if args.samples > 1 and args.temperature == 0:
        raise UserError(
            f"--samples {args.samples}: at --sampler.temperature 0 all samples are the same; raise the temperature"
        )
    if args.model and args.named_model:
        raise UserError(f"two models, {args.model} and --model {args.named_model}: give one of them")
    source = find_source(args, args.model or args.named_model)
    envs = make_envs(args, args.task, source.config if source else None)
    check_search(envs, args.mode)
    label = args.label or (source.label if source else args.model_name)
    settings = _settings(args, source, envs, label)
    with FolderLock(args.out or _default_folder(source, label), "--out") as lock:
        file = EvalResultsFile(lock.folder, settings)
        jobs = plan_jobs(envs, args.mode, args.limit, args.samples, args.seed)
        open_jobs = [job for job in jobs if job.key not in file.results]
        if open_jobs:
            policy = make_policy(args, source, envs.values())
            _check_prompts(policy, envs, open_jobs)
            progress = Progress(args.quiet)
            progress.start("evaluate", len(jobs), len(jobs) - len(open_jobs))

            def on_result(result: EvalResult) -> None:
                file.add(result)
                progress.advance(1)

            try:
                run_evaluation(policy, envs, open_jobs, on_result)
            finally:
                progress.close()
                for env in envs.values():
                    env.close()
        return _write_summary(lock.folder, file.finish(jobs), settings, args.json)


def _write_summary(
    folder: Path, results: Sequence[EvalResult], settings: Mapping[str, Any], as_json: bool
) -> int:
    """Write ``summary.json`` and ``table.md``, print one of the two; returns the exit status."""
    entries = summarize(results)
    for entry in entries:
        entry["is_sample"] = settings["tasks"][entry["task"]]["is_sample"]
    summary = {"label": settings["label"], "settings": settings, "entries": entries}
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    table = tables([summary])
    atomic_write(folder / "table.md", table + "\n")
    if as_json:
        print_json(summary)
    else:
        print(f"{table}\n\n{folder}: results.jsonl, summary.json, table.md")
    excluded = [result for result in results if result.excluded]
    if excluded:
        say(
            "sorl-eval",
            f"{len(excluded)} of {len(results)} answers are left out because a tool failed, the last one with: "
            f"{excluded[-1].error}. The same command tries them again",
        )
    return 1 if excluded else 0


def _check_prompts(policy: Policy, envs: Mapping[str, TextEnv], jobs: Sequence[Job]) -> None:
    """Raise ``UserError`` for prompts that are too long now: a folder with results takes no other limits."""
    template = policy.settings.use_chat_template
    for name, env in envs.items():
        asked = sorted({job.index for job in jobs if job.task == name and job.mode == "agent"})
        check_prompts([env], policy.tokenizer, use_chat_template=template, indices=asked)


def _settings(
    args: argparse.Namespace, source: PolicySource | None, envs: Mapping[str, TextEnv], label: str
) -> dict[str, Any]:
    rollout = rollout_settings(args, source)
    formats = {format_of(env) for env in envs.values()}
    return {
        "label": label,
        "policy": policy_facts(args, source),
        "tasks": {name: env_facts(env) for name, env in envs.items()},
        "modes": args.mode,
        "limit": args.limit,
        "samples": args.samples,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "seed": args.seed,
        "chat_template": rollout.use_chat_template,
        **({} if formats == {"tags"} else {"format": ", ".join(sorted(formats))}),
    }


def _default_folder(source: PolicySource | None, label: str) -> Path:
    if source is not None and source.run is not None:
        return source.run / f"evaluation{source.label.removeprefix(source.run.resolve().name)}"
    return Path("runs/evaluations") / "".join(c if c.isalnum() or c in "._-" else "_" for c in label)


if __name__ == "__main__":
    sys.exit(main())
