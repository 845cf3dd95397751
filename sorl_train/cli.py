"""``sorl-train``: reads the settings, makes a run folder, trains, and writes a report."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sorl_env.commands.command import FAILED, INTERRUPTED, run_command, say
from sorl_env.errors import UserError, install_command
from sorl_train.config.settings import TrainConfig

try:
    from sorl_train.config.files import DEFAULT_CONFIG, packaged_configs
    from sorl_train.config.options import Arguments, help_text, parse
    from sorl_train.config.schema import flatten
except ModuleNotFoundError as error:  # the core alone is installed
    raise SystemExit(f"sorl-train needs the package {error.name!r}: {install_command('train')}") from error

if TYPE_CHECKING:
    from sorl_train.run.display import Display
    from sorl_train.run.files import FolderLock
    from sorl_train.run.folder import RunDir

# torch and the terminal display are imported where they are needed, so that --help and messages appear at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    # torch warns of a package in OpenRLHF's environment, which a user cannot change
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    return run_command("sorl-train", _run, argv, interrupted="interrupted, nothing was started")


def _run(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if arguments.list_configs:
        return _show("\n".join(f"{name:<30}{about}" for name, about in packaged_configs().items()))
    from sorl_train.run.folder import settings_of

    config = settings_of(arguments)
    if arguments.help is not None:
        return _show(help_text(flatten(config), arguments.config or DEFAULT_CONFIG, arguments.help))
    if arguments.dry_run:
        from sorl_train.preflight.dry_run import plan_text
        from sorl_train.preflight.duration import Plan, read_measured

        told = dict(arguments.plan)
        measured = {n: value for path in told.pop("measured", ()) for n, value in read_measured(path).items()}
        return _show(plan_text(config, Plan(**told, measured=measured)))
    if arguments.resume and arguments.overwrite:
        raise UserError("--resume goes on with the run and --overwrite moves it aside: give one of them")
    from sorl_train.preflight.inputs import check_inputs

    check_inputs(config)
    from sorl_train.run.files import FolderLock
    from sorl_train.run.folder import RunDir

    assert config.run_dir is not None
    folder = Path(config.run_dir)
    if arguments.resume:
        if config.stage == "sft":
            raise UserError(
                "a supervised run is short and cannot be resumed: start it again with another --run_dir"
            )
        RunDir(folder).check_config()
    with FolderLock(folder, "--run_dir") as lock:  # before anything in the folder changes
        return _train(config, arguments, lock)


def _train(config: TrainConfig, arguments: Arguments, lock: FolderLock) -> int:
    """Make or reopen the run folder, train, and return the exit status."""
    from sorl_train.config.config_rules import remarks
    from sorl_train.run.display import make_display
    from sorl_train.run.folder import RunDir

    display = make_display()
    folder = lock.folder
    if arguments.resume:
        run_dir, changes = RunDir.resume(folder, config, lock=lock)
        display.message("\n".join([f"resuming {run_dir.path}", *(f"  {change}" for change in changes)]))
    else:
        run_dir = RunDir.create(folder, config, overwrite=arguments.overwrite, lock=lock)
        moved = f" (the earlier run was moved to {run_dir.moved})" if run_dir.moved else ""
        display.message("\n".join([f"run folder {run_dir.path}{moved}", *remarks(config)]))
    is_kept = arguments.resume
    try:
        summary = _run_stage(config, run_dir, display, arguments.resume)
        is_kept = True
        if summary.pop("is_sample", False):
            display.message("These figures are of the task's embedded sample, not of the benchmark.")
        display.close(summary | {"report": run_dir.report, "checkpoints": run_dir.checkpoints})
        return 0
    except UserError as error:
        display.close()
        say("sorl-train", f"{error}{_go_on(run_dir) if run_dir.begun else ''}")
        return FAILED
    except KeyboardInterrupt:
        display.close()
        again = _go_on(run_dir) or " before the first checkpoint; start it again"
        say("sorl-train", f"interrupted{again}", before="\n")
        return INTERRUPTED
    except Exception:
        if run_dir.begun and (again := _go_on(run_dir)):  # above what ``run_command`` says of the error
            display.message(again.strip())
        raise
    finally:
        display.close()
        if not is_kept:
            run_dir.discard_if_unused()


def _go_on(run_dir: RunDir) -> str:
    """The end of a message about what ended a run: the command that goes on with it, if there is a checkpoint."""
    from sorl_train.run.checkpoint import list_checkpoints, step_of

    if run_dir.summary.is_file():
        return (
            f"\nThe run is finished. Write its report with:\n  sorl-report {shlex.quote(str(run_dir.path))}"
        )
    saved = list_checkpoints(run_dir.checkpoints)
    if not saved:
        return ""
    again = f"sorl-train --resume --run_dir {shlex.quote(str(run_dir.path))}"
    return f"\nThe run is saved up to step {step_of(saved[-1])}. Go on from there with:\n  {again}"


def _run_stage(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
    """Train with the engine and stage of the config, and write the report; returns the summary."""
    if config.engine == "openrlhf":
        from sorl_train.openrlhf.launch import run
    elif config.stage == "sft":
        from sorl_train.train_sft import run
    else:
        from sorl_train.train_rl import run
    from transformers.utils import logging as transformers_logging

    from sorl_train.report.dialogues import step_files
    from sorl_train.report.report import write_report
    from sorl_train.report.viewer import write_viewer

    transformers_logging.disable_progress_bar()  # one bar for each checkpoint would bury the run's own lines
    summary = run(config, run_dir, display, resume)
    if step_files(run_dir.trajectories):
        write_viewer(run_dir.path)
    write_report([run_dir.path], run_dir.report)
    return summary


def _show(text: str) -> int:
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
