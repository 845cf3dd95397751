"""``sorl-ask``: one question, its turns, its answer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.task import Example
from sorl_train.evaluate.ask import ask, main, render, render_dialogue
from sorl_train.evaluate.runner import Policy


def test_a_dialogue_is_shown_as_in_the_papers_table(expert: Policy, minihop: ToolUseEnv) -> None:
    example = minihop.examples.examples[0]
    trajectory = ask(expert, minihop, example)
    assert trajectory.turns[-1].content == example.golden_answers[0]
    shown = render(minihop, Example("m", "Which one?", ("A",), {"A": "Radiation"}), trajectory)
    plain = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
    rule = "-" * 80
    assert plain[:6] == [rule, "Question: Which one?", "", "Options:", "A: Radiation", rule]
    assert plain[6] == trajectory.turns[0].text.splitlines()[0]
    assert plain[-1] == rule and plain.count(rule) == 2 + len(trajectory.turns)
    colours = dict(re.findall(r"\x1b\[(\d+)m</?(\w+)>\x1b\[0m", shown))
    assert colours == {"34": "think", "36": "search", "90": "information", "31": "answer"}


def test_no_text_talks_to_the_terminal(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Example("0", "\033[2J?", ("\x9b2J",), {"A": "\033[2J"})
    shown = render_dialogue(example, [("<think>\033[2J</think>", "")], ())
    assert "\033[2J" not in shown and shown.count("\N{SYMBOL FOR ESCAPE}[2J") == 3

    answered = SimpleNamespace(kind="answer", content="\033[2J", text="<answer>\033[2J</answer>")
    turn = SimpleNamespace(**vars(answered), format_error=None, observation="")
    dialogue = SimpleNamespace(turns=[turn], stop_reason=SimpleNamespace(value="answer"))
    monkeypatch.setattr("sorl_train.evaluate.ask.ask", lambda *_: dialogue)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = ["--index", "0", "--model", str(run_folder), "--hardware.threads", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "\033[31m<answer>" in printed and "\033[2J" not in printed
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(command) == 0
            assert "\033" not in capsys.readouterr().out


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
    assert main([*command, "--limits.max_new_tokens", "4"]) in (0, 1)
    assert "A: iron\nB: zinc" in capsys.readouterr().out


def test_the_options_are_read_without_torch() -> None:
    code = "import sys, sorl_train.evaluate.cli, sorl_train.evaluate.ask; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_question_does_not_need_what_a_reward_reads(expert: Policy, minihop: ToolUseEnv) -> None:
    """The asked example has no gold answer and no metadata: no reward is computed."""
    known = minihop.examples.examples[1]
    asked = Example(id="asked", question=known.question, metadata=known.metadata)
    assert ask(expert, minihop, known).reward == ask(expert, minihop, asked).reward == 0.0
