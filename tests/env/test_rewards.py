"""Rewards against public scorers, and multiple choice against everything it must not accept."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.rewards import answer_match, exact_match, f1, multiple_choice, normalize_answer, substring_match
from sorl_env.turns.tags import parse_turn


def cases(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / "cases" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_exact_and_substring_match_agree_with_seven_public_scorers(shared_data: Path) -> None:
    rows = cases(shared_data, "exact_match")
    assert len(rows) == 1384
    wrong = [
        row["id"]
        for row in rows
        if exact_match(row["prediction"], row["golds"]) != row["expected_em"]
        or substring_match(row["prediction"], row["golds"]) != row["expected_subem"]
    ]
    assert wrong == []
    assert 0 < sum(row["expected_em"] for row in rows) < len(rows)


def test_rollouts_are_valid_where_search_r1_says_so(shared_data: Path) -> None:
    """Except for an empty answer, which does not count here, and tags in retrieved text, which are removed."""
    rows = cases(shared_data, "rollout_format")
    assert len(rows) == 140 and 0 < sum(row["valid"] for row in rows) < len(rows)
    differing = []
    for row in rows:
        _, begun, reply = row["text"].partition("<|im_start|>assistant")
        turns = re.split(r"<information>.*?</information>", reply, flags=re.DOTALL)
        kinds = [parse_turn(turn.strip()).kind for turn in turns]
        if (bool(begun) and kinds == ["tool"] * (len(kinds) - 1) + ["answer"]) != row["valid"]:
            differing.append(row["mutation"])
    assert differing == ["empty_answer"] * 2 + ["tag_text_in_information"] * 2


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("A man, a plan, an apple", "man plan apple"),
        ("the", ""),
        ("U.S.", "us"),
        ("theatre", "theatre"),
        ("naïve café", "naïve café"),
        ("Brunswick\u2013Lüneburg", "brunswick\u2013lüneburg"),
        ("", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("the green hill", ["green hill"], 1.0),
        ("green", ["green hill"], 2 / 3),
        ("green green", ["green hill"], 1 / 2),
        ("red", ["green hill", "red hill"], 2 / 3),
        ("red", ["green"], 0.0),
        ("the", ["a"], 1.0),
        ("", ["green"], 0.0),
    ],
)
def test_f1(prediction: str, golds: list[str], expected: float) -> None:
    assert f1(prediction, golds) == pytest.approx(expected)
    assert exact_match("x", []) == substring_match("x", []) == f1("x", []) == 0.0


OPTIONS = {"A": "Iron deficiency", "B": "Zinc (low)", "C": "A"}


TAKEN = ["A", "a", " A\n", "(A)", "(a)", "A.", "a.", "A:Iron deficiency"]
TAKEN += ["A: Iron deficiency", "a: iron  DEFICIENCY."]
# the last three are a Greek capital alpha, a full-width A and a number
NOT_TAKEN = ["", "B", "A or B", "A, B", "AB", "A A", "A)", "(A", "(A).", "A..", "A:", "A: ", "A: Zinc (low)"]
NOT_TAKEN += ["A: the iron deficiency", "A: Iron-deficiency", "A: Iron deficiency or zinc"]
NOT_TAKEN += ["A. Iron deficiency"]
NOT_TAKEN += ["(A) Iron deficiency", "Iron deficiency", "The answer is A", "not A", "<answer>A</answer>"]
NOT_TAKEN += ["\u0391", "\uff21", "1"]


@pytest.mark.parametrize("prediction", TAKEN + NOT_TAKEN)
def test_the_letter_is_taken_in_these_forms_alone(prediction: str) -> None:
    assert multiple_choice(prediction, "A", OPTIONS) == float(prediction in TAKEN)
    assert prediction not in TAKEN or multiple_choice(prediction, "B", OPTIONS) == 0.0


def test_a_labelled_answer_needs_the_options() -> None:
    assert multiple_choice("A: Iron deficiency", "A") == 0.0
    assert multiple_choice("E: x", "E", OPTIONS) == 0.0
    assert multiple_choice("A", "A") == multiple_choice("J", "j") == 1.0
    assert multiple_choice("\u0131", "I") == 0.0  # a dotless i, which is "I" in upper case


@given(st.text(max_size=6))
def test_only_the_letter_scores(prediction: str) -> None:
    scored = multiple_choice(prediction, "A", OPTIONS) == 1.0
    assert scored == (prediction.strip() in {"A", "a", "A.", "a.", "(A)", "(a)"})


def test_a_gold_answer_that_normalizes_to_nothing_rewards_its_own_text_alone() -> None:
    for gold in ("A", "!!", "The The", "A+", "---"):
        assert answer_match(f" {gold.lower()}", [gold]) == 1.0
        for prediction in ("", " ", "...", "the", "a an", "#"):
            assert exact_match(prediction, [gold]) == 1.0  # as published scorers count it
            assert answer_match(prediction, [gold]) == 0.0
    assert answer_match("", [""]) == answer_match(" ", [" "]) == 0.0


def test_elsewhere_it_is_the_exact_match(shared_data: Path) -> None:
    same = [row for row in cases(shared_data, "exact_match") if all(map(normalize_answer, row["golds"]))]
    assert len(same) > 1300
    assert [row for row in same if answer_match(row["prediction"], row["golds"]) != row["expected_em"]] == []
