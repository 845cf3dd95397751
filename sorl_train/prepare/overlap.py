"""Finds questions that are in both of two splits: the same after normalization, or nearly the same.

Two questions are nearly the same if the Jaccard similarity of their sets of word shingles reaches a threshold. All such
pairs are found: a prefix filter skips only pairs that cannot reach it. (MinHash, the usual choice, estimates the same
similarity and misses pairs near the threshold by chance. It pays off on long documents, not on questions of ten to a
hundred words.)
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sorl_env.errors import UserError
from sorl_env.task import Example

SHINGLE = 2
THRESHOLD = 0.6
_WORD = re.compile(r"\w+")
_ARTICLES = frozenset(("a", "an", "the"))


@dataclass(frozen=True)
class Pair:
    """A train question and a test question that are the same or nearly the same.

    Attributes:
        kind: ``exact``: the same words in the same order, with options in any order; ``near``: similar.
        similarity: Jaccard similarity of the shingles, 1.0 for an exact pair.
        same_answer: they share an answer; usually False for two questions of one template about different things.
    """

    train_id: str
    test_id: str
    kind: str
    similarity: float
    same_answer: bool
    train_question: str
    test_question: str


def find_pairs(
    train: Sequence[Example], test: Sequence[Example], *, shingle: int = SHINGLE, threshold: float = THRESHOLD
) -> list[Pair]:
    """All pairs that are the same or similar, in the order of the test split, for each question the closest first.

    The options of a multiple-choice question belong to its text: with other options it is another question.

    Args:
        shingle: words of a shingle.
        threshold: smallest Jaccard similarity of a near-duplicate, above 0, at most 1.

    Raises:
        UserError: ``shingle`` or ``threshold`` is out of range.
    """
    if shingle < 1 or not 0 < threshold <= 1:
        raise UserError(
            f"shingle={shingle}, threshold={threshold}: give shingles of at least 1 word, a threshold above 0, up to 1"
        )
    index = _Index([_key(example) for example in test], shingle, threshold)
    found = []
    for train_index, one in enumerate(train):
        key = _key(one)
        for test_index, similarity in index.similar(key):
            exact, other = key == index.keys[test_index], test[test_index]
            pair = Pair(
                one.id,
                other.id,
                "exact" if exact else "near",
                round(similarity, 4),
                _share_answer(one, other),
                one.question,
                other.question,
            )
            found.append((test_index, not exact, -similarity, train_index, pair))
    return [pair for *_, pair in sorted(found, key=lambda item: item[:4])]


def count_pairs(pairs: Sequence[Pair]) -> dict[str, int]:
    """For each kind, the number of pairs, and of train and test questions in them."""
    counts = {}
    for kind in ("exact", "near"):
        of_kind = [pair for pair in pairs if pair.kind == kind]
        counts[f"{kind}_pairs"] = len(of_kind)
        counts[f"{kind}_train"] = len({pair.train_id for pair in of_kind})
        counts[f"{kind}_test"] = len({pair.test_id for pair in of_kind})
    return counts


def count_repeated(examples: Sequence[Example]) -> int:
    """How many questions of a split are word-for-word repetitions of an earlier one."""
    return len(examples) - len({_key(example) for example in examples})


Words = tuple[str, ...]
Key = tuple[Words, ...]  # the question's words, then those of each option


def _words(text: str) -> Words:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(word for word in words if word not in _ARTICLES) or tuple(words)


def _key(example: Example) -> Key:
    """The words of a question and its options; options are sorted, because their order does not matter."""
    options: Mapping[str, str] = example.options or {}
    return (_words(example.question), *sorted(_words(text) for text in options.values()))


def _shingles(key: Key, size: int) -> frozenset[Words]:
    """All runs of ``size`` words in the question and in each option; a shorter text is one shingle."""
    return frozenset(
        words[start : start + size] for words in key for start in range(max(1, len(words) - size + 1))
    )


def _share_answer(one: Example, other: Example) -> bool:
    def answers(example: Example) -> set[Words]:
        options = example.options or {}
        return {_words(options.get(answer, answer)) for answer in example.golden_answers}

    return not answers(one).isdisjoint(answers(other))


class _Index:
    """The test questions, indexed by their shingles.

    If the Jaccard similarity of x and y is at least t, they share at least ceil(t |x|) shingles. So in any common order
    the first shared shingle is among the first |x| - ceil(t |x|) + 1 of x, and likewise of y: only this prefix must be
    looked up. The order is by how many test questions have a shingle, so that frequent shingles are rarely looked up.
    """

    def __init__(self, keys: Sequence[Key], size: int, threshold: float) -> None:
        self.keys = keys
        self._size = size
        self._threshold = threshold
        self._sets = [_shingles(key, size) for key in keys]
        self._frequency = Counter(item for items in self._sets for item in items)
        self._by_shingle: dict[Words, list[int]] = defaultdict(list)
        for position, items in enumerate(self._sets):
            for item in self._prefix(items):
                self._by_shingle[item].append(position)

    def similar(self, key: Key) -> list[tuple[int, float]]:
        """The position and similarity of every test question that reaches the threshold."""
        items = _shingles(key, self._size)
        candidates = {other for item in self._prefix(items) for other in self._by_shingle.get(item, ())}
        found = []
        for other in sorted(candidates):
            shared = len(items & self._sets[other])
            similarity = shared / (len(items) + len(self._sets[other]) - shared)
            if similarity >= self._threshold - 1e-9:
                found.append((other, similarity))
        return found

    def _prefix(self, items: frozenset[Words]) -> list[Words]:
        kept = len(items) - math.ceil(self._threshold * len(items) - 1e-9) + 1
        known = sorted(
            (item for item in items if item in self._frequency),
            key=lambda item: (self._frequency[item], item),
        )
        return known[: max(0, kept - (len(items) - len(known)))]
