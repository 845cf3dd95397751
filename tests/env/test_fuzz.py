"""Hostile turns: nothing raises, and nothing earns what it did not."""

from __future__ import annotations

import pytest

from sorl_env import Example, FormatError

from .fuzz import earned, final_answer, fuzz, words

OPEN = Example("0", "Who?", ("The Beatles", "Fab Four"))
CHOICE = Example("1", "Which?", ("B",), {"A": "Iron", "B": "Zinc oxide", "I": "None"})


def turn(answer: str) -> str:
    return f"<think>so</think>\n<answer>{answer}</answer>"


def test_the_oracle_knows_an_answer_by_hand() -> None:
    assert final_answer(turn(" Oslo "), ("search",)) == "Oslo"
    wrong = ["Oslo", "<answer>x</answer>", "<think>a</think><answer>x</answer><think>"]
    wrong += ["<think>x<answer>y</answer></think>", turn("x") + "!", turn("x") * 2]
    wrong += [turn(answer) for answer in ("", "<search>x", "<information>")]
    for text in wrong:
        assert final_answer(text, ("search",)) is None
    assert words("The  Beatles' (an) a-b THE!") == ["beatles", "ab"]


@pytest.mark.parametrize(
    ("answer", "reward"), [("beatles!", 1), ("the fab four", 1), ("fab", 0), ("Beatle", 0)]
)
def test_the_oracle_knows_an_exact_match_by_hand(answer: str, reward: float) -> None:
    assert earned(turn(answer), OPEN, ()) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("B", 1), ("b", 1), ("(B)", 1), ("b.", 1), ("B: zinc  OXIDE.", 1), ("B: zinc-oxide", 0), ("B: iron", 0),
     ("A", 0), ("B or A", 0), ("Zinc oxide", 0), ("B:", 0), ("B)", 0)],
)  # fmt: skip
def test_the_oracle_knows_a_choice_by_hand(answer: str, reward: float) -> None:
    assert earned(turn(answer), CHOICE, ()) == reward


def check(turns: int, seed: int) -> None:
    seen = fuzz(turns, seed)
    assert seen["turns"] >= turns
    wanted = ["rewards", "replies cut", "format valid", "stop answer", "stop invalid", "stop max_turns"]
    wanted += [
        f"{tool} {end}" for tool in ("search", "calculator", "convert", "echo") for end in ("ok", "refused")
    ]
    of_tool_calls = {FormatError.BAD_CALL, FormatError.UNKNOWN_TOOL, FormatError.BAD_ARGUMENTS}
    wanted += [f"format {error.value}" for error in FormatError if error not in of_tool_calls]
    assert [name for name in wanted if seen[name] == 0] == []


def test_some_thousand_hostile_turns() -> None:
    check(4_000, seed=1)


@pytest.mark.slow
def test_two_hundred_thousand_hostile_turns() -> None:
    check(200_000, seed=2)
