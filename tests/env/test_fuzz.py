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


RIGHT = {OPEN.id: ["beatles!", "the fab four"], CHOICE.id: ["B", "b", "(B)", "b.", "B: zinc  OXIDE."]}
WRONG = {
    OPEN.id: ["fab", "Beatle"],
    CHOICE.id: ["B: zinc-oxide", "B: iron", "A", "B or A", "Zinc oxide", "B:", "B)"],
}


@pytest.mark.parametrize("example", [OPEN, CHOICE], ids=["open", "choice"])
def test_the_oracle_knows_right_answers_by_hand(example: Example) -> None:
    assert {earned(turn(answer), example, ()) for answer in RIGHT[example.id]} == {1}
    assert {earned(turn(answer), example, ()) for answer in WRONG[example.id]} == {0}


@pytest.mark.parametrize(("turns", "seed"), [(4_000, 1), pytest.param(200_000, 2, marks=pytest.mark.slow)])
def test_hostile_turns(turns: int, seed: int) -> None:
    seen = fuzz(turns, seed)
    assert seen["turns"] >= turns
    wanted = ["rewards", "replies cut", "format valid", "stop answer", "stop invalid", "stop max_turns"]
    wanted += [
        f"{tool} {end}" for tool in ("search", "calculator", "convert", "echo") for end in ("ok", "refused")
    ]
    of_tool_calls = {FormatError.BAD_CALL, FormatError.UNKNOWN_TOOL, FormatError.BAD_ARGUMENTS}
    wanted += [f"format {error.value}" for error in FormatError if error not in of_tool_calls]
    assert [name for name in wanted if seen[name] == 0] == []
