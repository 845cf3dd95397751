"""Choices: answers by hand, and every option of every real question in many forms. No letter is ever a wrong one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_env import load_examples, load_task
from sorl_env.option_text import option_words
from sorl_train.evaluate.answers import extract_choice, read_choice
from sorl_train.evaluate.mentions import outline

# Answers as models write them, with the letter that a careful reader takes from each, or null for what chooses nothing
BY_HAND = json.loads((Path(__file__).parent / "choice_cases.json").read_text(encoding="utf-8"))
CASES = [(row["options"], text, letter) for row in BY_HAND for text, letter in row["cases"]]
MISSED = {"B it is.", "Unlike A, B is low."}  # a reader may miss these; it may not take another letter

FILES = {
    "medqa": "medical/medqa_test",
    "medmcqa": "medical/medmcqa_dev",
    "pubmedqa": "medical/pubmedqa",
    "mmlu_medical": "medical/mmlu_med_test",
    "medxpertqa": "medical/medxpertqa_text",
    "alphamed19k": "alphamed/train_shaped",
}
AS_TEXT = ("{text}", "The answer is {text}.")
AS_LETTER = (
    "{letter}",
    "({letter})",
    "The answer is {letter}.",
    "The answer is ({letter}).",
    "Answer: {letter}",
    "**{letter}**",
    "\\boxed{{{letter}}}",
    "{letter}. {text}",
    "{letter}: {text}",
    "({letter}) {text}",
)
HEDGES = (
    "I am not sure",
    "A or B",
    "either A or B",
    "It could be A, but also B",
    "I don't know",
    "None of the above",
    "All of the above",
    "A: yes B: no C: maybe",
    "A, B",
    "A/B",
    "Both A and B are possible.",
    "I cannot decide between A and B.",
    "Neither A nor B.",
    "It depends.",
    "The answer is A or B.",
    "The answer is either (A) or (B).",
    "Maybe A, maybe B.",
    "No idea.",
    "I do not have enough information to answer.",
    "The answer is unclear.",
    "A? B? I am not certain.",
    "It is not A.",
    "The answer is not A.",
    "",
)


def questions(shared_data: Path, step: int) -> Iterator[Mapping[str, str]]:
    for task, name in FILES.items():
        data = load_examples(load_task(task), shared_data / f"{name}.jsonl.gz", "test")
        yield from (example.options or {} for example in data.examples[::step])


def wrong_letters(options: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Answers to a question from which a wrong letter is read, or none although there is one."""
    wrong: list[tuple[str, str | None]] = []
    texts = Counter(option_words(text) for text in options.values())
    cores = Counter(text.strip(" .").casefold() for text in options.values())
    for letter, text in options.items():
        # a text that two options share, or that is another option's letter, cannot be told
        shared = cores[text.strip(" .").casefold()] > 1 or (
            text.upper() in options and text.upper() != letter
        )
        # "A.Decrease in Km" as a text of option B: a label that contradicts itself
        shared |= text[1:2] == "." and text[0] in options and text[0] != letter
        for form in (*AS_TEXT, *AS_LETTER):
            found = extract_choice(form.format(letter=letter, text=text), options)
            if found != letter and not (found is None and shared and form in AS_TEXT):
                wrong.append((form.format(letter=letter, text=text), found))
    for hedge in HEDGES:
        found = extract_choice(hedge, options)
        if found is not None and option_words(hedge) not in {*texts, ()} | {("all", "of", "above")}:
            wrong.append((hedge, found))
    return wrong


@pytest.mark.parametrize(("options", "text", "letter"), CASES, ids=[repr(case[1])[:40] for case in CASES])
def test_answers_by_hand(options: dict[str, str], text: str, letter: str | None) -> None:
    found = extract_choice(text, options)
    assert found == letter or (found is None and text in MISSED)


def test_there_are_two_hundred_by_hand_and_hardly_any_is_missed() -> None:
    assert len({(text, *options) for options, text, _ in CASES}) >= 200
    assert sum(letter is not None and extract_choice(t, o) is None for o, t, letter in CASES) <= len(MISSED)


@pytest.mark.parametrize(
    "before", ["", "<think>The answer is A or B. I am not sure.</think>\n", "Let me think.\n\n"]
)
def test_what_stands_before_does_not_matter(before: str) -> None:
    for options, text, letter in CASES:
        if text and letter is not None and text not in MISSED:
            assert read_choice(f"{before}<answer>{text}</answer>", options) == letter


def test_no_option_of_a_real_question_gives_a_wrong_letter(shared_data: Path) -> None:
    assert [wrong for options in questions(shared_data, 60) for wrong in wrong_letters(options)] == []


@pytest.mark.slow
def test_no_option_of_any_real_question_gives_a_wrong_letter(shared_data: Path) -> None:
    rows = list(questions(shared_data, 1))
    assert len(rows) > 9_000 and sum(map(len, rows)) > 37_000
    seen = {
        json.dumps(options): options for options in rows
    }.values()  # AlphaMed's rows repeat those of other sets
    assert [wrong for options in seen for wrong in wrong_letters(options)] == []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*"AaBb Zz.,:-*()[]\n\\'/", "Iron", "zinc ", "answer ", "is ", "not ", "or "]))
)
def test_a_choice_is_an_option_that_stands_in_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    options = {"A": "Iron", "B": "Zinc"}
    letter = extract_choice(text, options)
    assert letter in {None, "A", "B"}
    if letter:
        lower = text.casefold()
        assert letter.casefold() in lower or options[letter].casefold() in lower
    for line in outline(text, options):
        assert line == " ".join(line.split()) and line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("I think (A) is wrong; it is **B: zinc**.", ["i think A is wrong", "it is B"]),
        ("A man lacks vitamin B and zinc fingers.", ["a man lacks vitamin b and ~B fingers"]),
        ("Answer:\n\nb) Iron", ["answer : ?"]),
    ],
)
def test_an_outline_has_upper_case_letters_for_options_alone(text: str, line: list[str]) -> None:
    assert outline(text, {"A": "Iron", "B": "Zinc"}) == line
