"""Reading answers and letters out of what models write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sorl_env import load_examples, load_task
from sorl_env.rewards import multiple_choice
from sorl_train.evaluate.answers import read_answer, scores

OPTIONS = {"A": "Iron", "B": "Zinc", "C": "Vitamin B12", "D": "Vitamin B"}
FILES = {
    "medqa": "medical/medqa_test",
    "medmcqa": "medical/medmcqa_dev",
    "pubmedqa": "medical/pubmedqa",
    "mmlu_medical": "medical/mmlu_med_test",
    "medxpertqa": "medical/medxpertqa_text",
    "alphamed19k": "alphamed/train_shaped",
}
HEDGES = (
    "I am not sure",
    "either A or B",
    "A or B",
    "A, B",
    "A/B",
    "None of the above, or A",
    "The answer is A or B.",
    "The answer is either (A) or (B).",
    "The answer is not A.",
    "It is not A.",
    "A? B? I am not certain.",
    "The answer is unclear.",
    "A man presents with pain.",
    "The answer is a patient",
)


def chosen(output: str, options: Mapping[str, str], mode: str = "cot") -> list[str]:
    """The letters for which an output scores 1."""
    found = read_answer(output, mode, options)
    answer = None if found is None else found.text
    return [letter for letter in options if scores(answer, [letter], options)["choice"]]


@pytest.mark.parametrize(
    ("output", "letters"),
    [
        ("<think>The answer is A.</think><answer>B</answer>", "B"),
        ("<answer>A</answer> no, <answer> (c) </answer>", "C"),
        ("<answer>B: zinc</answer>", "B"),
        ("<answer>A: Zinc</answer>", ""),  # a label that contradicts itself
        ("<answer>none</answer> The answer is A.", ""),  # what stands in the block counts
        ("B", "B"),
        ("(b).", ""),
        (" b. \n", "B"),
        ("<think>The answer is A.</think> (D)", "D"),
        ("<think>The answer is A.</think>", ""),
        ("The answer is (A).", "A"),
        ("the answer is b", "B"),
        ("Answer: B", "B"),
        ("**Final answer: B**", "B"),
        ("The correct answer is: **C**", "C"),
        ("The answer is (A), because iron is low.", "A"),
        ("The answer is B since A is a metal. I am sure.", "B"),
        ("So the answer is B: Zinc.", "B"),
        ("The answer is A. Wait, that is wrong. The answer is C.", "C"),
        ("The answer is E.", ""),
        ("Copper", ""),
        ("", ""),
        *((hedge, "") for hedge in HEDGES),
    ],
)
def test_choices_as_models_write_them(output: str, letters: str) -> None:
    assert chosen(output, OPTIONS) == list(letters)


def test_mode_direct_takes_the_first_line_as_it_is() -> None:
    assert chosen("B: Zinc\n\nIt is low.", OPTIONS, "direct") == ["B"]
    assert chosen("B: Zinc\n\nIt is low.", OPTIONS, "cot") == []
    assert read_answer("Zinc", "direct", OPTIONS) is None and read_answer("Zinc", "direct") is not None
    assert read_answer("The answer is unclear.", "direct", OPTIONS) is None


def questions(shared_data: Path, step: int) -> Iterator[Mapping[str, str]]:
    for task, name in FILES.items():
        data = load_examples(load_task(task), shared_data / f"{name}.jsonl.gz", "test")
        yield from (example.options or {} for example in data.examples[::step])


def test_no_option_of_a_real_question_gives_a_wrong_letter(shared_data: Path) -> None:
    forms = ("{letter}", "({letter})", "The answer is {letter}.", "Answer: ({letter})", "{letter}: {text}")
    for options in questions(shared_data, 60):
        for letter, text in options.items():
            for form in forms:
                assert chosen(form.format(letter=letter, text=text), options) == [letter]
                block = f"<answer>{form.format(letter=letter, text=text)}</answer>"
                assert chosen(block, options) in ([letter], [])
            assert chosen(text, options) in ([], [letter])
            assert chosen(f"The answer is {text}.", options) in ([], [letter])
        assert [hedge for hedge in HEDGES if chosen(hedge, options)] == []


def test_training_and_evaluation_score_an_answer_by_one_rule() -> None:
    for answer in ("A", "(a)", "A.", "A: iron", "A: zinc", "[A]", "A or B", "Iron", "", "A, of course"):
        assert scores(answer, ["A"], OPTIONS) == {"choice": multiple_choice(answer, "A", OPTIONS)}


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
