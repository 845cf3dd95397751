"""Reading answers and letters out of what models write."""

from __future__ import annotations

import pytest

from sorl_train.evaluate.answers import extract_choice, read_answer, read_choice

OPTIONS = {"A": "Iron", "B": "Zinc", "C": "Vitamin B12", "D": "Vitamin B"}
DRUGS = {
    "A": "Aspirin",
    "B": "Intravenous immunoglobulin",
    "C": "Aspirin and intravenous immunoglobulin",
    "D": "Observation alone",
}
TEN = {letter: f"finding number {i}" for i, letter in enumerate("ABCDEFGHIJ", start=1)}
YES = {"A": "yes", "B": "no", "C": "maybe"}

CASES = [
    # the letter and nothing else
    (OPTIONS, "B", "B"),
    (OPTIONS, "b", "B"),
    (OPTIONS, "B.", "B"),
    (OPTIONS, "(B)", "B"),
    (OPTIONS, "(b)", "B"),
    (OPTIONS, "B)", "B"),
    (OPTIONS, "[B]", "B"),
    (OPTIONS, "**B**", "B"),
    (OPTIONS, '"B"', "B"),
    (OPTIONS, "  B \n", "B"),
    (OPTIONS, "Option B", "B"),
    (OPTIONS, "option (b)", "B"),
    (OPTIONS, "Choice: C", "C"),
    (TEN, "J", "J"),
    (TEN, "I", "I"),
    # the letter and its option
    (OPTIONS, "B: Zinc", "B"),
    (OPTIONS, "B. Zinc", "B"),
    (OPTIONS, "(B) Zinc.", "B"),
    (OPTIONS, "b) zinc", "B"),
    (OPTIONS, "**B: Zinc**", "B"),
    # the option alone
    (OPTIONS, "Zinc", "B"),
    (OPTIONS, "zinc.", "B"),
    (OPTIONS, "The Zinc", "B"),
    (OPTIONS, "Vitamin B", "D"),
    (OPTIONS, "vitamin B12", "C"),
    (YES, "yes", "A"),
    (YES, "No.", "B"),
    (YES, "Maybe", "C"),
    # declared in prose
    (OPTIONS, "The answer is B.", "B"),
    (OPTIONS, "the answer is b", "B"),
    (OPTIONS, "The answer is (B).", "B"),
    (OPTIONS, "The correct answer is: B", "B"),
    (OPTIONS, "Answer: B", "B"),
    (OPTIONS, "Final answer: **B**", "B"),
    (OPTIONS, "ANSWER: (c)", "C"),
    (OPTIONS, "Therefore, the correct option is C, since A is a metal.", "C"),
    (OPTIONS, "The best choice would be D", "D"),
    (OPTIONS, "I choose B because zinc is found there.", "B"),
    (OPTIONS, "I would go with option A.", "A"),
    (OPTIONS, "So the answer is $\\boxed{A}$.", "A"),
    (OPTIONS, "\\boxed{\\text{C}}", "C"),
    (OPTIONS, "B is correct.", "B"),
    (OPTIONS, "A is wrong. (C) is the correct answer.", "C"),
    (OPTIONS, "The answer is B: Zinc, not A: Iron.", "B"),
    (OPTIONS, "The answer is A. Wait, that is wrong. The answer is C.", "C"),
    (OPTIONS, "The answer is zinc.", "B"),
    (OPTIONS, "The answer is therefore A", "A"),
    (TEN, "After all, the answer is H.", "H"),
    # one letter, or one option, somewhere in prose
    (OPTIONS, "Looking at the list, (D) fits the picture.", "D"),
    (OPTIONS, "It must be zinc, which is low in these patients.", "B"),
    (OPTIONS, "Such patients lack vitamin B12, as a rule.", "C"),
    (OPTIONS, "My pick: B", "B"),
    (DRUGS, "Aspirin and intravenous immunoglobulin should be given.", "C"),
    (DRUGS, "Give aspirin.", "A"),
    (OPTIONS, "A man of 60 lacks B", "B"),
    (YES, "No, mitochondria do not take part in it.", "B"),
    (YES, "Yes, there is no doubt about that.", "A"),
    # nothing, or not one of the options
    (OPTIONS, "", None),
    (OPTIONS, "   ", None),
    (OPTIONS, "I do not know.", None),
    (OPTIONS, "E", None),
    (OPTIONS, "The answer is E.", None),
    (OPTIONS, "Copper", None),
    (OPTIONS, "A man presents with pain.", None),
    (TEN, "I think it is unclear.", None),
    (OPTIONS, "The answer is not given.", None),
    (OPTIONS, "a patient", None),
    (YES, "There is no doubt that they play a role.", None),
    # hedged
    (OPTIONS, "A or B", None),
    (OPTIONS, "A, B", None),
    (OPTIONS, "AB", None),
    (OPTIONS, "The answer is A or B.", None),
    (OPTIONS, "The answer is (A) and (C).", None),
    (OPTIONS, "Either (A) or (B).", None),
    (OPTIONS, "Both iron and zinc.", None),
    (OPTIONS, "A: Zinc", None),
    (YES, "yes and no", None),
]


@pytest.mark.parametrize(("options", "text", "letter"), CASES, ids=[repr(case[1])[:40] for case in CASES])
def test_choices_as_models_write_them(options: dict[str, str], text: str, letter: str | None) -> None:
    assert extract_choice(text, options) == letter


def test_there_are_sixty_of_them_at_least() -> None:
    assert len({case[1] for case in CASES}) >= 60


def test_a_choice_is_read_in_the_answer_block_or_outside_of_thoughts() -> None:
    assert read_choice("<think>The answer is A.</think><answer>B</answer>", OPTIONS) == "B"
    assert read_choice("<answer>A</answer> no, <answer>(c)</answer>", OPTIONS) == "C"
    assert read_choice("<think>The answer is A.</think> The answer is D.", OPTIONS) == "D"
    assert read_choice("<think>The answer is A.</think>", OPTIONS) is None
    assert (
        read_choice("<answer>none</answer> The answer is A.", OPTIONS) is None
    )  # what stands in the block counts


@pytest.mark.parametrize(
    ("output", "mode", "answer"),
    [
        ("<think>x</think><answer> Paris </answer>", "cot", ("Paris", "tag")),
        ("<answer>Rome</answer><answer>Paris</answer>", "rag", ("Paris", "tag")),
        ("<answer></answer>", "cot", ("", "tag")),
        ("<answer>two\nlines</answer>", "direct", ("two\nlines", "tag")),
        ("The answer is Paris.", "cot", ("Paris", "phrase")),
        ("Answer: J. R. R. Tolkien. He wrote it.", "cot", ("J. R. R. Tolkien", "phrase")),
        ("the answer is Rome. Hm.\nSo the final answer is: Paris\n", "cot", ("Paris", "phrase")),
        ("<think>the answer is Rome</think>", "cot", None),
        ("Paris", "cot", None),
        ("Paris", "rag", None),
        ("", "direct", None),
        ("Paris\nIt is the capital.", "direct", ("Paris", "text")),
        ("\n\n Paris", "direct", ("Paris", "text")),
        ("<answer>Paris", "cot", None),  # the block was never closed
    ],
)
def test_answers_as_models_write_them(output: str, mode: str, answer: tuple[str, str] | None) -> None:
    assert read_answer(output, mode) == answer


def test_an_answer_in_the_prompts_example_cannot_be_read() -> None:
    """The output alone is read: a policy that says it does not know is not scored on the prompt's own example."""
    assert read_answer("I do not know.", "cot") is None
