"""A question that is too long is named before the first step; a run that an error ends is saved and can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.cli import main
from sorl_train.engine import LocalEngine
from sorl_train.evaluate.cli import main as evaluate
from sorl_train.learner.optimizer_step import NonFiniteError
from sorl_train.preflight.doctor import main as doctor
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir

from .conftest import QuietDisplay, short_config, train_short
from .outcomes import outcome

TASK = '''
"""How many bolts lie on a shelf; the tool knows."""

from sorl_env import Example, Limits, Task
from sorl_env.rewards import exact_match


def shelf(number: str) -> str:
    return f"bolts {int(number) % 7}"


shelf.inline = True


def reward(example, turns):
    answers = [turn.content for turn in turns if turn.kind == "answer"]
    return {"exact_match": exact_match(answers[-1], example.golden_answers) if answers else 0.0}


def expert(example, observations):
    if observations:
        return f"<think> bolts </think> <answer> {example.golden_answers[0]} </answer>"
    return f"<think> look </think> <shelf> {example.id[:3]} </shelf>"


TASK = Task(
    name="shelves",
    prompt=lambda example: f"Answer . {example.question}",
    reward=reward,
    parse_row=lambda row: Example(row["id"], row["question"], (row["bolts"],)),
    tools=[shelf],
    limits=Limits(3, max_prompt_tokens=16, max_new_tokens=24, max_observation_tokens=32, max_trajectory_tokens=128),
    embedded=lambda split: [Example(f"{i:03}", f"How many bolts lie on shelf {i} ?", (str(i % 7),)) for i in range(40)],
    expert=expert,
    vocabulary=lambda: ["How many bolts lie on shelf look Answer ? .", *(f"{i:03} {i}" for i in range(400))],
)
'''
LONG = 333  # the index of the row that is too long: row 334


def rows(folder: Path, *long: int) -> str:
    """400 questions in a file; those of ``long`` have 30 words more, and ids of 1,000 characters."""
    lines = []
    for i in range(400):
        words, tail = (" bolts" * 30, " x" * 500) if i in long else ("", "")
        question = f"How many bolts lie on shelf {i} ?{words}"
        lines.append(json.dumps({"id": f"{i:03}{tail}", "question": question, "bolts": str(i % 7)}))
    path = folder / f"questions{len(long)}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "shelves.py"
    path.write_text(TASK)
    return str(path)


def options(task: str, data: str, **more: Any) -> list[str]:
    settings = {"task": task, "data": data, "sft.steps": 2, "tiny.hidden_size": 48, "tiny.num_layers": 2}
    settings |= {"rollout.batch_size": 8, "update.mini_batch_size": 8, "update.steps": 1, "eval.every": 0}
    settings |= {"eval.num_examples_final": 4, "log.tensorboard": "false"} | more
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize("ask", [main, lambda argv: main([*argv, "--dry_run"]), doctor])
def test_it_is_named_before_anything_starts(
    ask: Any, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = options(task, rows(tmp_path, LONG), run_dir=tmp_path / "run")
    assert ask(argv) in (1, 2)
    said = " ".join("".join(capsys.readouterr()).split())
    assert "1 of 400 prompts are longer than the 16 tokens" in said and "the longest has 40" in said
    assert "row 334 of" in said and "--limits.max_prompt_tokens 40, or remove" in said
    assert "x x x" in said and "x" * 5 not in said and said.count(" x") < 60  # the id is shortened
    assert not (tmp_path / "run").exists()
    assert ask([*argv, "--limits.max_prompt_tokens", "40"]) == 0


def test_a_longer_trajectory_is_asked_for_where_it_is_needed(task: str, tmp_path: Path) -> None:
    config = short_config(
        task=task, task_args={}, data=rows(tmp_path, 1, 2, 3, 4, 5, 6, 7), limits__max_trajectory_tokens=30
    )
    with pytest.raises(UserError) as caught:
        LocalEngine(config, RunDir.create(tmp_path / "run", config), QuietDisplay(), _tiny(task, tmp_path))
    assert "7 of 400" in str(caught.value) and "and 2 more" in str(caught.value)
    assert "--limits.max_prompt_tokens 40 --limits.max_trajectory_tokens 54," in str(caught.value)


def _tiny(task: str, folder: Path) -> str:
    from sorl_env.task.registry import load_task
    from sorl_train.models.tiny import build_tiny_policy

    build_tiny_policy(load_task(task), folder / "tiny", hidden_size=48, num_layers=2)
    return str(folder / "tiny")


def test_an_evaluation_counts_first(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [_tiny(task, tmp_path), "--task", task, "--data", rows(tmp_path, LONG)]
    assert evaluate([*argv, "--out", str(tmp_path / "out")]) == 2
    assert "row 334" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # a folder with results would take no other limit


# -- a run that ends with an error ------------------------------------------------------------------------------
SETTINGS: dict[str, Any] = {"update__steps": 4, "checkpoint__every": 10}


class Broken(RuntimeError):
    """A fault of a sampler."""


def fails_at(step: int, error: Exception, patch: pytest.MonkeyPatch) -> None:
    collect = LocalEngine.collect

    def failing(self: LocalEngine, number: int) -> Any:
        if number == step:
            raise error
        return collect(self, number)

    patch.setattr(LocalEngine, "collect", failing)


@pytest.mark.slow
def test_it_is_saved_and_goes_on_exactly(tmp_path: Path) -> None:
    settings = SETTINGS | {"rollout__max_staleness": 2}
    whole, _ = train_short(tmp_path / "whole", **settings)
    for step in (2, 4):
        path = tmp_path / f"broken{step}"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Broken):
            fails_at(step, Broken("gone"), patch)
            train_short(path, **settings)
        recorded = max(0, step - 3)
        checkpoint = path / "checkpoints" / f"step_{recorded:06d}"
        # those that waited are kept
        assert len(list(checkpoint.glob("stale_*.jsonl"))) == step - 1 - recorded
        resumed, _ = train_short(path, resume=True, **settings)
        found = outcome(resumed)
        if recorded == 0:  # its checkpoint has the batches that waited; that of the start had none
            found = {name: value for name, value in found.items() if "step_000000/stale_" not in name}
        assert found == outcome(whole)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    def broken(self: LocalEngine, batch: Any) -> Any:
        raise NonFiniteError("one of the old_log_probs", batch.ids[:1])

    collect = LocalEngine.collect

    def failing(self: LocalEngine, step: int) -> Any:
        if step == 3:
            patch.setattr(LocalEngine, "score", broken)
        return collect(self, step)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UserError, match=r"step_000000\. Look .* with a lower optim\.lr"),
    ):
        patch.setattr(LocalEngine, "collect", failing)
        train_short(tmp_path / "run", **SETTINGS)
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step_*"))] == [
        "step_000000"
    ]


# -- limits at a resume -----------------------------------------------------------------------------------------
def test_a_resume_may_raise_limits_and_not_lower_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"update__steps": 1, "loss__kl_coef": 0.01}
    run_dir, _ = train_short(tmp_path / "run", **settings)  # limits as the task has them: prompts of 128
    reference = sorted((Path(run_dir.path).parent).iterdir())
    more = {"update__steps": 2, "loss__kl_coef": 0.01}
    for name, limit in (("max_prompt_tokens", 127), ("max_turns", 1), ("max_seconds", 60.0)):
        with pytest.raises(UserError, match=rf"limits\.{name}: .* in the run, {limit} now"):
            train_short(run_dir.path, resume=True, **more, **{f"limits__{name}": limit})
    display = QuietDisplay()
    config = short_config(**more, limits__max_prompt_tokens=160)
    resumed, changes = RunDir.resume(run_dir.path, config)
    assert "limits.max_prompt_tokens: None -> 160" in changes
    from sorl_train.train_rl import run

    run(config, resumed, display, True)
    # the run's own one, with its limits
    assert not [line for line in display.messages if "cold start" in line]
    assert [line["step"] for line in read_jsonl(resumed.metrics)] == [0, 1, 2]
    assert sorted((Path(run_dir.path).parent).iterdir()) == reference
    # from now on it is the higher one that may not fall
    with pytest.raises(UserError, match=r"limits\.max_prompt_tokens: 160 in the run, 140 now"):
        train_short(
            run_dir.path, resume=True, update__steps=3, loss__kl_coef=0.01, limits__max_prompt_tokens=140
        )
    train_short(run_dir.path, resume=True, update__steps=3, loss__kl_coef=0.01, limits__max_prompt_tokens=160)
