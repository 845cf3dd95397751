"""Scores against recorded cases of public scorers and by hand; pass@k against counting."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from sorl_train.evaluate.answers import answer_in_text, ks, pass_at_k, scores


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


def test_choice_scores_alone() -> None:
    options = {"A": "Iron", "B": "Zinc"}
    assert scores("(b)", ["B"], options) == {"choice": 1.0}
    assert scores("A or B", ["B"], options) == scores(None, ["B"], options) == {"choice": 0.0}


def test_an_answer_in_retrieved_text_stands_there_as_whole_words() -> None:
    assert answer_in_text("Doc 1 (X): in the Paris, of 1900", ["Paris of 1900"], None)
    assert not answer_in_text("comparisons", ["Paris"], None)
    assert answer_in_text("low zinc levels", ["B"], {"A": "Iron", "B": "Zinc"})
    assert not answer_in_text("B is a letter", ["B"], {"A": "Iron", "B": "Zinc"})
    assert not answer_in_text("anything", ["the"], None)  # nothing is left of it


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (4, 3), (5, 2), (1, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, c: int) -> None:
    samples = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_what_makes_no_sense() -> None:
    for wrong in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass_at_k"):
            pass_at_k(*wrong)


def test_the_ks_reported() -> None:
    assert [ks(n) for n in (1, 2, 4, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]
