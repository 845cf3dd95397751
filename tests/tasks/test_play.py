"""sorl-play: a person, or the expert, in the policy's place."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from sorl_env.commands.play import main

Play = Callable[..., tuple[int, str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    def run(typed: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = main(arguments)
        return status, capsys.readouterr().out

    return run


def test_an_episode_by_shortcuts(play: Play) -> None:
    typed = "s Mozart born\ns Salzburg river\na the Salzach\n"
    status, out = play(typed, "hotpotqa", "--index", "1", "--show-answer")
    assert status == 0
    assert "Question: Which river flows through the city where Wolfgang Amadeus Mozart was born?" in out
    assert "You have 4 turns." in out
    assert "Doc 1 (Wolfgang Amadeus Mozart)" in out
    assert "Reward 1 (exact_match 1); ended by answer after 3 turns." in out
    assert out.endswith("Right answer: Salzach | the Salzach | Salzach River\n")


def test_full_turns_over_several_lines(play: Play) -> None:
    typed = "<think>I know\nthis one</think>\n<answer>Salzach</answer>\n"
    assert "Reward 1 (exact_match 1)" in play(typed, "hotpotqa", "--index", "1")[1]


def test_a_malformed_turn_says_why(play: Play) -> None:
    typed = "<answer>Salzach</answer>\n<think>open\n\na Salzach\n"
    out = play(typed, "hotpotqa", "--index", "1")[1]
    assert "[invalid turn: missing_think" in out
    assert "[invalid turn: unclosed" in out
    assert "Reward 1 (exact_match 1); ended by answer after 3 turns." in out


def test_help_for_what_it_does_not_know(play: Play) -> None:
    out = play("hello\ns\na\n\nq\n", "nq", "--seed", "1")[1]
    assert out.count("  s ARGUMENT      call search") == 5  # once at the start, once for each
    assert "You left before the end: no reward." in out


def test_end_of_input_leaves(play: Play) -> None:
    status, out = play("s Mozart\n", "nq", "--index", "0")
    assert status == 0
    assert "You left before the end" in out


def test_turns_run_out(play: Play) -> None:
    out = play("s a1\n" * 9, "nq", "--index", "0")[1]
    assert "Reward 0 (exact_match 0); ended by max_turns after 4 turns." in out and "Right answer" not in out


def test_the_expert_plays(play: Play) -> None:
    status, out = play("", "minihop", "--auto", "expert", "--seed", "3")
    assert status == 0
    assert "> <think>" in out
    assert "Reward 1 (exact_match 1); ended by answer" in out
    assert "You have" not in out


def test_ctrl_c_is_calm(
    play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["nq"]) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\nStopped.\n")
    assert "Traceback" not in captured.err
