"""Reading answers out of what models write, and scoring them: recorded cases of public scorers, and counting."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sorl_env import load_examples, load_task
from sorl_env.rewards import multiple_choice
from sorl_train.evaluate.answers import ks, pass_at_k, read_answer, scores

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
    assert scores("(a)", ["A"], OPTIONS) == {"choice": 1.0} and scores(None, ["A"], OPTIONS) == {
        "choice": 0.0
    }


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
        ("", "direct", None),
        ("Paris\nIt is the capital.", "direct", ("Paris", "text")),
        ("\n\n Paris", "direct", ("Paris", "text")),
        ("<answer>Paris", "cot", None),  # the block was never closed
    ],
)
def test_answers_as_models_write_them(output: str, mode: str, answer: tuple[str, str] | None) -> None:
    assert read_answer(output, mode) == answer


# --- scores ---------------------------------------------------------------------------------------
def test_scores_agree_with_seven_public_scorers(shared_data: Path) -> None:
    with gzip.open(shared_data / "cases" / "exact_match.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 1384
    for row in rows:
        found = scores(row["prediction"], row["golds"], None)
        assert (found["em"], found["subem"]) == (row["expected_em"], row["expected_subem"]), row["id"]
        assert found["f1"] >= found["em"]


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("the cat sat", ["a cat"], 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # articles go: {cat, sat} against {cat}
        ("Paris", ["Paris", "Rome"], 1.0),
        ("Paris France", ["Rome", "France Paris Europe"], 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("cat cat", ["cat"], 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # a repeated word counts once
        ("Rome", ["Paris"], 0.0),
        ("x", [], 0.0),
        (None, ["Paris"], 0.0),
    ],
)
def test_f1_by_hand(answer: str | None, golds: list[str], expected: float) -> None:
    assert scores(answer, golds, None)["f1"] == pytest.approx(expected)


def test_no_answer_scores_nothing_even_where_the_gold_is_an_article() -> None:
    assert scores(None, ["the"], None) == {"em": 0.0, "f1": 0.0, "subem": 0.0}


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (4, 3), (5, 2), (1, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, c: int) -> None:
    samples = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_ks_reported() -> None:
    assert [ks(n) for n in (1, 2, 4, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]
