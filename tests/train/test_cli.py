"""The command line: options, help, errors and exit statuses; training itself is replaced by a stand-in here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.cli import main
from sorl_train.config.files import load_config
from sorl_train.config.options import parse
from sorl_train.config.schema import fields, sections
from sorl_train.config.settings import TrainConfig
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir

Run = Callable[[TrainConfig, RunDir, Display, bool], dict[str, Any]]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[TrainConfig, RunDir, bool]]:
    """Stand-ins for trainer and report; the calls they got. The working folder is a new one."""
    calls: list[tuple[TrainConfig, RunDir, bool]] = []

    def run(config: TrainConfig, run_dir: RunDir, display: Display, resume: bool) -> dict[str, Any]:
        calls.append((config, run_dir, resume))
        run_dir.write_summary({"final_success": 0.97})
        return {"final_success": 0.97, "wall_s": 61.0}

    install(monkeypatch, run)
    monkeypatch.chdir(tmp_path)
    return calls


def install(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Put ``run`` in place of training, and a report writer that writes a line."""

    def write_report(run_dirs: list[Path], out: Path) -> Path:
        out.write_text(f"report of {run_dirs[0].name}")
        return out

    monkeypatch.setattr("sorl_train.train_rl.run", run)
    monkeypatch.setattr("sorl_train.train_sft.run", run)
    monkeypatch.setattr("sorl_train.report.report.write_report", write_report)


# -- a fresh process -------------------------------------------------------------------------------------------
def test_help_and_mistakes_do_not_load_torch() -> None:
    code = (
        "import sys; from sorl_train.cli import main; "
        "print([main(a) for a in (['--optim.lrr', '1'], ['--algo', 'x'], ['--help'], ['--list_configs'])], "
        "[m for m in ('torch', 'transformers', 'rich', 'bm25s') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *shown, last = done.stdout.splitlines()
    assert last == "[2, 2, 0, 0] []", done.stderr
    assert {"quickstart", "smollm2_hotpotqa"} <= {line.partition(" ")[0] for line in shown}


def test_without_the_train_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['yaml'] = None; import sorl_train.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr
        == "sorl-train needs the package 'yaml': pip install -e \".[train]\" in your clone of sorl\n"
    )


# -- options ---------------------------------------------------------------------------------------------------
def test_options_become_typed_overrides() -> None:
    arguments = parse(
        "--optim.lr 1e-4 --update.epochs=2 --log.tensorboard false --hardware.gradient_checkpointing --task-args.hops "
        "[1,2] --tiny.hidden_size 64 --data none --run-dir a-b".split()
    )
    assert arguments.overrides == {
        "optim.lr": 1e-4,
        "update.epochs": 2,
        "log.tensorboard": False,
        "hardware.gradient_checkpointing": True,
        "task_args.hops": [1, 2],
        "tiny.hidden_size": 64,
        "data": None,
        "run_dir": "a-b",
    }
    assert arguments.config is arguments.help is None and not (arguments.resume or arguments.overwrite)


EVERY = tuple(field.help for field in fields()) + tuple(sections().values())


@pytest.mark.parametrize(
    ("arguments", "says", "leaves_out"),
    [
        (
            "",
            ("--optim.lr FLOAT Learning rate of the actor [0.0005]", "need rollout.group_size"),
            ("--optim.beta1",),
        ),
        (
            "loss",
            (sections()["loss"], "Upper clip range, if it differs from clip_eps. [none]"),
            ("--optim.lr",),
        ),
        ("general", ("--split TEXT Split of the training data. [train]",), ("--loss.",)),
        ("all", ("Learning rate of the actor. Paper: 1e-6. [0.0005]", *EVERY), ()),
        ("loss --algo cispo", ("if it differs from clip_eps. [4.0]", "Temperature of sapo's gate"), ()),
    ],
)
def test_help(
    arguments: str,
    says: tuple[str, ...],
    leaves_out: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # so that no word is divided at its hyphen
    assert main(["--help", *arguments.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in says if " ".join(part.replace("``", "").split()) not in text] == []
    assert "``" not in text
    assert [part for part in leaves_out if part in text] == []


# -- running ---------------------------------------------------------------------------------------------------
def test_no_options_run_the_quickstart(trainer: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    ((config, run_dir, resume),) = trainer
    assert (config.task, config.algo, resume) == ("minihop", "so_ppo", False)
    assert config.run_dir == str(run_dir.path) == "runs/quickstart-so_ppo-s0"
    assert run_dir.report.read_text() == "report of quickstart-so_ppo-s0"
    assert load_config(str(run_dir.config)) == config  # a saved config is a config
    out = capsys.readouterr().out
    for part in ("final success", "0.97", "1 min 01 s", str(run_dir.report), str(run_dir.checkpoints)):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--algo", "so_grpo", "--seed", "3"], "runs/quickstart-so_grpo-s3"),
        (["--config", "smollm2_hotpotqa"], "runs/smollm2_hotpotqa-so_ppo-s0"),
        (["--task", "my task.py"], "runs/my_task-so_ppo-s0"),
        (["--stage", "sft"], "runs/quickstart-sft-s0"),
        (["--run_dir", "there"], "there"),
    ],
)
def test_the_run_folders_name(arguments: list[str], folder: str, trainer: list[Any]) -> None:
    Path("my task.py").write_text("from sorl_tasks.minihop import TASK")
    assert main(arguments) == 0
    assert str(trainer[0][1].path) == folder


def test_a_second_run_is_refused_then_moved_aside(
    trainer: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run_dir", "r"]) == 0
    assert main(["--run_dir", "r"]) == 2
    assert "r holds a finished run" in capsys.readouterr().err
    assert main(["--run_dir", "r", "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "r-2"]


def test_resume_brings_its_own_settings(trainer: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run_dir", "r", "--optim.lr", "0.25", "--algo", "so_grpo"]) == 0
    assert main(["--resume", "--run_dir", "r", "--update.steps", "77"]) == 0
    config, _, resume = trainer[1]
    assert resume and (config.optim.lr, config.algo, config.update.steps) == (0.25, "so_grpo", 77)
    assert "update.steps: 16 -> 77" in capsys.readouterr().out
    assert main(["--resume", "--run_dir", "r", "--seed", "1", "--update.steps", "78"]) == 2
    assert "seed: 0 in the run, 1 now" in capsys.readouterr().err
    # another config than the run's
    assert main(["--resume", "--run_dir", "r", "--config", "quickstart"]) == 2
    assert "optim.lr: 0.25 in the run" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "said", "unsaved"),
    [
        (UserError("the search server is out"), 1, "the search server is out", ""),
        (KeyboardInterrupt(), 130, "interrupted", " before the first checkpoint; start it again"),
    ],
)
def test_what_ends_a_run_says_how_to_go_on(
    error: BaseException,
    status: int,
    said: str,
    unsaved: str,
    saved: bool,
    trainer: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder in which nothing has happened goes."""

    def fails(config: TrainConfig, run_dir: RunDir, *_: object) -> dict[str, Any]:
        if saved:
            (run_dir.checkpoints / "step_000003").mkdir()
        raise error

    install(monkeypatch, fails)
    assert main(["--run_dir", "my run"]) == status
    again = (
        "\nThe run is saved up to step 3. Go on from there with:\n  sorl-train --resume --run_dir 'my run'"
    )
    assert capsys.readouterr().err.lstrip() == f"sorl-train: {said}{again if saved else unsaved}\n"
    assert Path("my run").exists() is saved


# -- the dry run -----------------------------------------------------------------------------------------------
def test_dry_run_shows_the_plan_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers (the train extra)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    options = "--algo so_grpo --loss.kl_coef 0.01 --task_args.train_questions 40"
    assert main(["--dry_run", *options.split()]) == 0
    out = capsys.readouterr().out
    for part in (
        "  optim.lr: 0.0005  (default 1e-06)",
        " others have their defaults (sorl-train --help all)",
        "train: embedded, split train",
        "first prompt",
        "search: ",
        "parameters",
        "reference: a frozen copy",
        "peak",
        "a step collects 48 trajectories: 6 prompts, 8 rollouts of each",
        "run folder: runs/quickstart-so_grpo-s0",
    ):
        assert part in out
    assert "\n  critic:" not in out
    assert list(tmp_path.rglob("*.safetensors")) == [] and not (tmp_path / "runs").exists()
