"""Questions that stand in both of two splits: the same after normalization, or nearly the same.

Near-duplicates are pairs whose sets of word shingles have a Jaccard similarity of at least a threshold. The join is
exact and without random numbers: a prefix filter leaves out only pairs that cannot reach the threshold. (MinHash, the
usual choice, estimates the same figure and misses pairs near the threshold by chance. It pays off on documents; a
question has ten to a hundred words.)
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
    """A train question and a test question that are the same, or nearly.

    Attributes:
        kind: ``exact``: the same words in the same order, options in any order; ``near``: similar enough.
        similarity: Jaccard similarity of the shingles, 1.0 for an exact pair.
        same_answer: they share an answer; of two templated questions about different things it is usually False.
    """

    train_id: str
    test_id: str
    kind: str
    similarity: float
    same_answer: bool
    train_question: str
    test_question: str


def find_pairs(
    train: Sequence[Example],
    test: Sequence[Example],
    *,
    shingle: int = SHINGLE,
    threshold: float = THRESHOLD,
) -> list[Pair]:
    """Every pair of the two splits that is the same or similar, in the order of the test split, the closest first.

    The options of multiple choice belong to the text: "Which is true?" is another question with other options.

    Args:
        shingle: words of a shingle.
        threshold: least Jaccard similarity of a near-duplicate, above 0, at most 1.

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
    """Pairs, and the questions of each side that are in one, by kind."""
    counts = {}
    for kind in ("exact", "near"):
        of_kind = [pair for pair in pairs if pair.kind == kind]
        counts[f"{kind}_pairs"] = len(of_kind)
        counts[f"{kind}_train"] = len({pair.train_id for pair in of_kind})
        counts[f"{kind}_test"] = len({pair.test_id for pair in of_kind})
    return counts


def count_repeated(examples: Sequence[Example]) -> int:
    """How many questions of a split stood in it before, word for word."""
    return len(examples) - len({_key(example) for example in examples})


Words = tuple[str, ...]
Key = tuple[Words, ...]  # the question's words, then those of each option


def _words(text: str) -> Words:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(word for word in words if word not in _ARTICLES) or tuple(words)


def _key(example: Example) -> Key:
    """Options are sorted: a shuffled question is the same one."""
    options: Mapping[str, str] = example.options or {}
    return (_words(example.question), *sorted(_words(text) for text in options.values()))


def _shingles(key: Key, size: int) -> frozenset[Words]:
    """Runs of ``size`` words within the question and within each option; a shorter text is one shingle."""
    return frozenset(
        words[start : start + size] for words in key for start in range(max(1, len(words) - size + 1))
    )


def _share_answer(one: Example, other: Example) -> bool:
    def answers(example: Example) -> set[Words]:
        options = example.options or {}
        return {_words(options.get(answer, answer)) for answer in example.golden_answers}

    return not answers(one).isdisjoint(answers(other))


class _Index:
    """The test questions by their shingles.

    If J(x, y) >= t then x and y share at least ceil(t |x|) shingles, so in any common order the first shared one is
    among the first |x| - ceil(t |x|) + 1 of x, and likewise of y. Ordered by how many test questions have a shingle,
    those of x that none has come first and need not be looked up, and the frequent ones hardly ever are.
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
        """(position, Jaccard) of every test question that reaches the threshold."""
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
