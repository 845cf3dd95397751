"""Figures of a step's searches, by hand."""

from __future__ import annotations

import pytest

from sorl_env.task import Example
from sorl_env.tool import ToolCall
from sorl_tools.search.stats import findable_answers, holds_answer, search_metrics


def call(query: str, reply: str = "", *, ok: bool = True) -> ToolCall:
    return ToolCall("search", query, reply, ok=ok)


def test_by_hand() -> None:
    metrics = search_metrics(
        [
            (
                [call("who?", "Doc 1 (A): the Eiffel Tower, Paris."), call("Who? ")],
                ["eiffel tower"],
            ),
            ([call("where?", "Doc 1: nothing")], ["Rome", "Paris"]),
            ([call("WHO?", "Doc 1: a tower")], []),  # no golden answer, so nothing to find
            ([], ["Rome"]),  # never searched
        ]
    )
    assert metrics == {
        "tool/duplicate_query_rate": pytest.approx(2 / 4),
        "tool/answer_in_top_k": pytest.approx(1 / 2),
    }


def test_nothing_searched() -> None:
    assert search_metrics([]) == search_metrics([([], ["Rome"])]) == {}
    assert "tool/answer_in_top_k" not in search_metrics([([call("x")], [])])


def test_answers_are_whole_words_of_replies_that_came() -> None:
    assert holds_answer([call("x", "Doc 1 (The Beatles): An English band.")], ["the beatles!"])
    assert not holds_answer([call("x", "Doc 1: Romeo and Juliet")], ["Rome"])
    assert not holds_answer([call("x", "Rome", ok=False)], ["Rome"])
    assert not holds_answer([call("x", "Doc 1: a")], ["the", ""])  # nothing is left of them
    assert not holds_answer([], ["Rome"])


def test_what_can_be_found_of_golden_answers() -> None:
    options = {"A": "Aspirin", "B": "Heparin"}
    assert findable_answers(Example("0", "?", ("Rome", "No.", "Norway", "Yes"))) == ("Rome", "Norway")
    assert findable_answers(Example("0", "?", ("B",), options)) == ("Heparin",)
    assert findable_answers(Example("0", "?", ("A",), {"A": "yes", "B": "no"})) == ()
