"""``sorl-ask``: one question, its turns, its answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sorl_env.env import ToolUseEnv
from sorl_env.task import Example
from sorl_train.evaluate.ask import ask, main, render
from sorl_train.evaluate.runner import Policy


def test_a_dialogue_is_shown_as_the_environment_shows_it(expert: Policy, minihop: ToolUseEnv) -> None:
    example = minihop.examples.examples[0]
    trajectory = ask(expert, minihop, example)
    assert trajectory.turns[-1].content == example.golden_answers[0]
    env = ToolUseEnv(minihop.task, split="test", render_mode="ansi")
    env.reset(options={"index": 0})
    for turn in trajectory.turns:
        env.step(turn.text)
    assert render(minihop, example, trajectory) == env.render()


def test_a_question_of_ones_own(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["What is the employer of nobody?", "--model", str(run_folder), "--hardware.threads", "1"])
    printed, error = capsys.readouterr()
    assert "vocabulary lacks nobody" in error and "--index N" in error
    assert "Question: What is the employer of nobody?" in printed and "\033" not in printed
    assert (status, "No answer: " in printed) in ((1, True), (0, False))


def test_options_are_shown_and_the_prompt_holds_them(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["Which?", "--task", "alphamed19k", "--options", "A=iron", "B=zinc", "--model", str(run_folder)]
    assert main([*command, "--limits.max_new_tokens", "4", "--color", "always"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "A: iron\nB: zinc" in printed and "\033[1mQuestion:" in printed


def test_the_options_are_read_without_torch() -> None:
    code = "import sys, sorl_train.evaluate.cli, sorl_train.evaluate.ask; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_question_does_not_need_what_a_reward_reads(expert: Policy, minihop: ToolUseEnv) -> None:
    """The asked example has no gold answer and no metadata: no reward is computed."""
    known = minihop.examples.examples[1]
    asked = Example(id="asked", question=known.question, metadata=known.metadata)
    assert ask(expert, minihop, known).reward == ask(expert, minihop, asked).reward == 0.0
