"""Finds questions that are in both of two splits: the same words in the same order, after normalization."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sorl_env.task import Example

_WORD = re.compile(r"\w+")
_ARTICLES = frozenset(("a", "an", "the"))
Words = tuple[str, ...]
Key = tuple[Words, ...]  # the question's words, then those of each option


@dataclass(frozen=True)
class Pair:
    """A train question and a test question that are the same, and whether they share an answer."""

    train_id: str
    test_id: str
    same_answer: bool
    train_question: str
    test_question: str


def find_pairs(train: Sequence[Example], test: Sequence[Example]) -> list[Pair]:
    """All pairs of the same question, in the order of the test split.

    The options of a multiple-choice question belong to its text, in any order: with other options it is another
    question.
    """
    by_key: dict[Key, list[Example]] = defaultdict(list)
    for example in train:
        by_key[_key(example)].append(example)
    return [
        Pair(one.id, other.id, bool(_answers(one) & _answers(other)), one.question, other.question)
        for other in test
        for one in by_key.get(_key(other), ())
    ]


def count_pairs(pairs: Sequence[Pair]) -> dict[str, int]:
    """The number of pairs, and of train and test questions in them."""
    return {
        "pairs": len(pairs),
        "train": len({pair.train_id for pair in pairs}),
        "test": len({pair.test_id for pair in pairs}),
    }


def _key(example: Example) -> Key:
    """The words of a question and its options; options are sorted, because their order does not matter."""
    options: Mapping[str, str] = example.options or {}
    return (_words(example.question), *sorted(_words(text) for text in options.values()))


def _words(text: str) -> Words:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(word for word in words if word not in _ARTICLES) or tuple(words)


def _answers(example: Example) -> set[Words]:
    options = example.options or {}
    return {_words(options.get(answer, answer)) for answer in example.golden_answers}
