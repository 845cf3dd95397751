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


QUESTION = "Question: Which river flows through the city where Wolfgang Amadeus Mozart was born?"
ANSWERED = "Reward 1 (exact_match 1); ended by answer after "
SECOND = ("hotpotqa", "--index", "1")


@pytest.mark.parametrize(
    ("typed", "arguments", "shown"),
    [
        ("s Mozart born\ns Salzburg river\na the Salzach\n", (*SECOND, "--show-answer"),
         [QUESTION, "You have 4 turns.", "Doc 1 (Wolfgang Amadeus Mozart)", f"{ANSWERED}3 turns.",
          "Right answer: Salzach | the Salzach | Salzach River\n"]),
        ("<think>I know\nthis one</think>\n<answer>Salzach</answer>\n", SECOND, [ANSWERED]),
        ("<answer>Salzach</answer>\n<think>open\n\na Salzach\n", SECOND,
         ["[invalid turn: missing_think", "[invalid turn: unclosed", f"{ANSWERED}3 turns."]),
        ("hello\nq\n", ("nq", "--seed", "1"), ["  s ARGUMENT      call search", "You left before the end: no reward."]),
        ("s Mozart\n", ("nq", "--index", "0"), ["You left before the end"]),
        ("s a1\n" * 9, ("nq", "--index", "0"), ["Reward 0 (exact_match 0); ended by max_turns after 4 turns."]),
    ],
    ids=["shortcuts", "full turns", "malformed turns", "unknown words", "the input ends", "turns run out"],
)  # fmt: skip
def test_a_person_plays(play: Play, typed: str, arguments: tuple[str, ...], shown: list[str]) -> None:
    status, out = play(typed, *arguments)
    assert status == 0
    for text in shown:
        assert text in out
    assert ("Right answer" in out) == ("--show-answer" in arguments)
    assert out.count("  s ARGUMENT ") == 1 + ("hello" in typed)  # the help again for what it does not know


def test_the_expert_plays(play: Play) -> None:
    status, out = play("", "minihop", "--auto", "expert", "--seed", "3")
    assert status == 0
    assert "> <think>" in out
    assert "Reward 1 (exact_match 1); ended by answer" in out
    assert "You have" not in out


def test_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a caf\xe9\n"), encoding="utf-8"))
    assert main(["nq", "--index", "0"]) == 1
    assert (
        "sorl-play: the input is not utf-8 text (invalid continuation byte): corr" in capsys.readouterr().err
    )


def test_ctrl_c_is_calm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert main(["nq"]) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\nStopped.\n")
    assert "Traceback" not in captured.err
