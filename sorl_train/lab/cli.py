"""``sorl-lab``: run studies of many training runs, and replay the collapse alarm on finished runs.

``sorl-lab stability`` runs a study, several runs side by side, and makes one results file and one table of it; after an
interruption the same command continues. ``sorl-lab compare`` says how high each algorithm gets at its own best learning
rate, and what is left at ten times that rate. ``sorl-lab alarm`` judges the alarm's limits on finished runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from sorl_env.commands.command import Parser, interrupt_on, number, run_command, say, whole
from sorl_env.errors import UserError
from sorl_train.config.files import to_yaml
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.lab import alarm, compare
from sorl_train.lab.study import Study, StudyRun, load_study, packaged_studies, table, write_results
from sorl_train.report.report import write_report
from sorl_train.run.files import FolderLock, atomic_write
from sorl_train.run.folder import RunDir

POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 a run failed, 2 wrong usage, 130 interrupted."""
    again = "interrupted; the same command goes on where this one stopped"
    return run_command("sorl-lab", _run, argv, interrupted=again)


def _run(argv: Sequence[str]) -> int:
    interrupt_on(signal.SIGINT, signal.SIGTERM)  # a shell ignores SIGINT for what it starts in the background
    parser = Parser(prog="sorl-lab", description=(__doc__ or "").replace("``", ""))
    commands = parser.add_subparsers(dest="command", required=True)
    stability = commands.add_parser("stability", help="run a study that compares algorithms")
    known = f"a study: {', '.join(packaged_studies())}, or a path to a .yaml"
    stability.add_argument("--config", required=True, help=known)
    stability.add_argument(
        "--only", default="", help="only runs whose cell contains this text, as 'so_ppo, '"
    )
    stability.set_defaults(run=_stability)
    compared = commands.add_parser("compare", help="each algorithm at its best rate, and at ten times it")
    about = "a study whose only axis is optim.lr, with rates and their tenfold (default: %(default)s)"
    compared.add_argument("--config", default="algorithms", help=about)
    compared.set_defaults(run=_compare)
    for running in (stability, compared):
        add = running.add_argument
        add("--out", type=Path, help="folder of the study (default: runs/studies/NAME)")
        jobs = "runs at a time (default: one per core)"
        add("--jobs", type=whole(1), default=os.cpu_count() or 1, help=jobs)
        add("--seeds", type=whole(1), metavar="N", help="only the first N seeds")
        add("--table", action="store_true", help="print the table of the finished runs, run nothing")
    replayed = commands.add_parser("alarm", help="replay the collapse alarm on finished runs")
    runs = "a run, a study's folder, or a file of recorded runs"
    replayed.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=runs)
    usual = AlarmConfig().mean_update_distance
    about = f"alarm above this mean update distance (default: {usual:g})"
    replayed.add_argument(
        "--alarm.mean_update_distance", type=number(above=0), default=usual, metavar="LIMIT", help=about
    )
    replayed.set_defaults(run=_alarm)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


def _study(arguments: argparse.Namespace) -> tuple[Study, Path]:
    study = load_study(arguments.config)
    folder = arguments.out or Path("runs/studies") / study.name
    if arguments.table and not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: the study has not run there; --out names another folder"
        )
    seeds = sorted({run.seed for run in study.runs})[: arguments.seeds]
    return Study(study.name, tuple(run for run in study.runs if run.seed in seeds)), folder


def _stability(arguments: argparse.Namespace) -> int:
    study, folder = _study(arguments)
    chosen = [run for run in study.runs if arguments.only in f"{run.cell}, "]
    if not chosen:
        cells = "\n".join(f"  {cell}" for cell in dict.fromkeys(run.cell for run in study.runs))
        raise UserError(f"--only {arguments.only!r} matches no cell; the cells are\n{cells}")
    failed = [] if arguments.table else run_all(chosen, folder, arguments.jobs)
    results = write_results(study, folder)
    return _conclude(study, folder, failed, table(results) if results else "")


def _compare(arguments: argparse.Namespace) -> int:
    study, folder = _study(arguments)
    first = compare.first_runs(study)
    failed: list[StudyRun] = []
    if not arguments.table:
        failed = run_all(first, folder, arguments.jobs)
        results = compare.with_lost(study, write_results(study, folder), folder)
        failed += run_all(compare.tenfold_runs(study, results), folder, arguments.jobs)
    results = compare.with_lost(study, compare.with_times(write_results(study, folder), folder), folder)
    return _conclude(study, folder, failed, compare.table(study, results) if results else "")


def _conclude(study: Study, folder: Path, failed: Sequence[StudyRun], table: str) -> int:
    """Print the table, make the page of all runs, and name the runs that are missing; the exit status."""
    print(table or "no run has finished yet")
    if table and any(folder.glob("runs/*/config.yaml")):  # to save space, they may be gone
        print(f"\nall runs on one page: {write_report([folder], folder / 'report.html')}")
    for run in study.runs:
        if run in failed:
            log = folder / "logs" / f"{run.id}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
            why = f"failed ({last}; its log is {log})"
        elif (folder / "runs" / run.id).is_dir() and not _finished(run, folder):
            why = "has not finished"
        else:
            continue
        say("sorl-lab", f"{run.cell}, seed {run.seed} {why}, so it is not in the table")
    return 1 if failed else 0


def _alarm(arguments: argparse.Namespace) -> int:
    runs = alarm.read_runs(arguments.runs)
    limits = AlarmConfig(mean_update_distance=getattr(arguments, "alarm.mean_update_distance"))
    print(alarm.table(runs, [alarm.judge(run, limits) for run in runs]))
    return 0


def run_all(runs: Sequence[StudyRun], folder: Path, jobs: int) -> list[StudyRun]:
    """Run those that have not finished, ``jobs`` at a time, each in its own process, and return those that failed.

    A run that was interrupted earlier continues from its last checkpoint. Ctrl-C lets every run save and end. Raises
    ``UserError`` if another process is running the study in this folder.
    """
    waiting, failed = [run for run in runs if not _finished(run, folder)], []
    _progress(f"{len(runs)} runs, {len(runs) - len(waiting)} done, {jobs} at a time")
    for name in ("logs", "configs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    running: dict[subprocess.Popen[bytes], tuple[StudyRun, float]] = {}
    # the runs inherit the lock, so they still hold it if sorl-lab is killed
    with FolderLock(folder, "--out") as lock:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running[_start(run, folder, lock.descriptor)] = (run, time.monotonic())
                for process in [process for process in running if process.poll() is not None]:
                    run, started = running.pop(process)
                    state = "done" if process.returncode == 0 and _finished(run, folder) else "FAILED"
                    if state == "FAILED":
                        failed.append(run)
                    done, took = len(runs) - len(waiting) - len(running), time.monotonic() - started
                    _progress(f"{done}/{len(runs)} {state:<6} {took:5.0f} s  {run.cell}, seed {run.seed}")
                time.sleep(POLL_S)
        except BaseException:
            _end(running)
            raise
    return failed


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end(running: Collection[subprocess.Popen[bytes]]) -> None:
    """Make the runs save and end. They do not receive the terminal's Ctrl-C, so each further one is passed on."""
    while True:
        try:
            for process in running:
                process.send_signal(signal.SIGINT)  # does nothing if it has ended
            for process in running:
                process.wait()
            return
        except KeyboardInterrupt:
            continue


def _start(run: StudyRun, folder: Path, lock: int) -> subprocess.Popen[bytes]:
    run_dir = folder / "runs" / run.id
    if RunDir(run_dir).config.is_file() and RunDir(run_dir).has_checkpoint:
        words = ["--resume"]
    else:
        config = folder / "configs" / f"{run.id}.yaml"
        atomic_write(config, to_yaml(run.config))
        words = ["--config", str(config), "--overwrite"]
    command = [sys.executable, "-m", "sorl_train.cli", *words, "--run_dir", str(run_dir)]
    with (folder / "logs" / f"{run.id}.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock,)
        )


def _finished(run: StudyRun, folder: Path) -> bool:
    return RunDir(folder / "runs" / run.id).summary.is_file()


if __name__ == "__main__":
    sys.exit(main())
