"""``sorl-lab``: studies of many runs, and what the collapse alarm says of runs that are over.

``sorl-lab stability`` runs a study, several runs side by side, resumable; one results file and one table.
``sorl-lab alarm`` judges the alarm's limits on runs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sorl_env.command import Parser, number, run_command, whole
from sorl_env.errors import UserError
from sorl_train.config.files import to_yaml
from sorl_train.config.run_settings import AlarmConfig
from sorl_train.lab import alarm as alarm_lab
from sorl_train.lab.study import Run, Study, load_study, packaged_studies, results_of, table
from sorl_train.report.groups import find_runs
from sorl_train.report.report import write_report
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir

POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 a run failed, 2 wrong usage, 130 interrupted."""
    again = "interrupted; the same command goes on where this one stopped"
    return run_command("sorl-lab", _run, argv, interrupted=again)


def _run(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGINT, _interrupt)  # a shell that starts it in the background has it ignored
    signal.signal(signal.SIGTERM, _interrupt)
    parser = Parser(prog="sorl-lab", description=(__doc__ or "").replace("``", ""))
    commands = parser.add_subparsers(dest="command", required=True)
    stability = commands.add_parser(
        "stability", help="compare algorithms over rates, reuse, staleness and seeds"
    )
    stability.add_argument(
        "--config", required=True, help=f"a study: {', '.join(packaged_studies())}, or a path to a .yaml"
    )
    stability.add_argument("--out", type=Path, help="folder of the study (default: runs/studies/NAME)")
    stability.add_argument(
        "--jobs", type=whole(1), default=os.cpu_count() or 1, help="runs at a time (default: cores)"
    )
    stability.add_argument(
        "--only", default="", help="only runs whose cell contains this text, as 'so_ppo, '"
    )
    stability.add_argument("--seeds", type=whole(1), help="only the first so many seeds")
    stability.add_argument("--list", action="store_true", help="show the runs and which are finished")
    stability.add_argument(
        "--table", action="store_true", help="print the table of what is finished, run nothing"
    )
    alarm = commands.add_parser("alarm", help="what the collapse alarm says of runs that are over")
    alarm.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run, a study's folder, or a file of --records"
    )
    for name in alarm_lab.LIMITS:
        default = getattr(AlarmConfig(), name)
        what = f"alarm.{name} (default: {default:g})"
        alarm.add_argument(f"--{name}", type=number(above=0), default=default, metavar="LIMIT", help=what)
    alarm.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="also write what the alarm looks at, a line of JSON a run",
    )
    arguments = parser.parse_args(argv)
    return _alarm(arguments) if arguments.command == "alarm" else _stability(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stability(arguments: argparse.Namespace) -> int:
    study = load_study(arguments.config)
    folder = arguments.out or Path("runs/studies") / study.name
    seeds = sorted({run.seed for run in study.runs})[: arguments.seeds]
    chosen = [run for run in study.runs if arguments.only in f"{run.cell}, " and run.seed in seeds]
    if not chosen:
        cells = "\n".join(f"  {cell}" for cell in dict.fromkeys(run.cell for run in study.runs))
        raise UserError(f"--only {arguments.only!r} matches no cell; the cells are\n{cells}")
    open_runs = [run for run in chosen if not _finished(run, folder)]
    if arguments.list:
        for run in chosen:
            print(f"{'done' if _finished(run, folder) else 'open':<6}{run.cell}, seed {run.seed}  {run.id}")
        return 0
    failed: list[Run] = []
    if arguments.table and not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: the study has not run there; --out names another folder"
        )
    if not arguments.table:
        print(
            f"{study.name}: {len(chosen)} runs, {len(chosen) - len(open_runs)} done, {arguments.jobs} at a time"
        )
        failed = run_all(open_runs, folder, arguments.jobs)
    _tell(study, folder, failed)
    return 1 if failed else 0


def _tell(study: Study, folder: Path, failed: Sequence[Run]) -> None:
    """Write the results and the page, print the table, and name the runs that are not in it."""
    results = write_results(study, folder)
    if results:
        print(table(results))
        others = {run.path.name for run in find_runs([folder])} - {run.id for run in study.runs}
        if others:
            print(
                f"\nruns not of this study as it is now, so in the page but not in the table: {len(others)}"
            )
        print(f"\nall runs in one page: {write_report([folder], folder / 'report.html')}")
    else:
        print("no run has finished yet")
    for run in study.runs:
        if run in failed:
            log = folder / "logs" / f"{run.id}.log"
            last = [
                line
                for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
                if line.strip()
            ]
            why = f"failed ({last[-1] if last else 'without a word'}; its log is {log})"
        elif (folder / "runs" / run.id).is_dir() and not _finished(run, folder):
            why = "begun and not finished"
        else:
            continue
        print(f"{why}, so not in the table: {run.cell}, seed {run.seed}", file=sys.stderr)


def _alarm(arguments: argparse.Namespace) -> int:
    runs = alarm_lab.read_runs(arguments.runs)
    limits = AlarmConfig(**{name: getattr(arguments, name) for name in alarm_lab.LIMITS})
    print(alarm_lab.table(runs, [alarm_lab.judge(run, limits) for run in runs]))
    if arguments.records:
        alarm_lab.write_records(runs, arguments.records)
    return 0


def run_all(runs: Sequence[Run], folder: Path, jobs: int) -> list[Run]:
    """Run them, ``jobs`` at a time, each in a process of its own; returns those that failed.

    A run that broke off before goes on from its last checkpoint. Ctrl-C lets every run save and end.

    Raises:
        UserError: other runs are at work in the folder.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "configs").mkdir(exist_ok=True)
    with _alone_in(folder) as lock:
        return _run_side_by_side(runs, folder, jobs, lock)


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """Hold a lock, whose descriptor the runs get as well: those that outlive a killed sorl-lab still hold it."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another sorl-lab, or a run that one left behind, is at work in {folder}; wait until it has ended, "
                "or choose another --out"
            ) from error
        yield file.fileno()


def _run_side_by_side(runs: Sequence[Run], folder: Path, jobs: int, lock: int) -> list[Run]:
    waiting, failed = list(runs), []
    running: dict[subprocess.Popen[bytes], tuple[Run, float]] = {}
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[_start(run, folder, lock)] = (run, time.monotonic())
            for process in [process for process in running if process.poll() is not None]:
                run, started = running.pop(process)
                done += 1
                took = time.monotonic() - started
                state = "done" if process.returncode == 0 else "FAILED"
                print(f"{done}/{len(runs)} {state:<6} {took:5.0f} s  {run.cell}, seed {run.seed}", flush=True)
                if process.returncode:
                    failed.append(run)
            time.sleep(POLL_S)
    except BaseException:
        _end(running)
        raise
    return failed


def _end(running: Collection[subprocess.Popen[bytes]]) -> None:
    """Have them save and end; each further Ctrl-C is passed on, as they do not get the terminal's."""
    while True:
        try:
            for process in running:
                process.send_signal(signal.SIGINT)  # none for one that has ended
            for process in running:
                process.wait()
            return
        except KeyboardInterrupt:
            continue


def _start(run: Run, folder: Path, lock: int) -> subprocess.Popen[bytes]:
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


def _finished(run: Run, folder: Path) -> bool:
    return RunDir(folder / "runs" / run.id).summary.is_file()


def write_results(study: Study, folder: Path) -> list[dict[str, Any]]:
    """``results.jsonl``: a line for each finished run; returns what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    results = results_of(study, folder)
    atomic_write(folder / "results.jsonl", "".join(f"{json.dumps(line)}\n" for line in results))
    return results


if __name__ == "__main__":
    sys.exit(main())
