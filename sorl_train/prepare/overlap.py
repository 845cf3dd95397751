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
from collections.abc import Iterator, Mapping, Sequence
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
    keys = [[_key(example) for example in split] for split in (train, test)]
    sets = [[_shingles(key, shingle) for key in split] for split in keys]
    found = []
    for train_index, test_index, similarity in _similar(sets[0], sets[1], threshold):
        exact = keys[0][train_index] == keys[1][test_index]
        one, other = train[train_index], test[test_index]
        kind = "exact" if exact else "near"
        pair = Pair(
            one.id,
            other.id,
            kind,
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


def _words(text: str) -> tuple[str, ...]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(word for word in words if word not in _ARTICLES) or tuple(words)


def _key(example: Example) -> tuple[tuple[str, ...], ...]:
    """The question's words, then those of each option, sorted: a shuffled question is the same one."""
    options: Mapping[str, str] = example.options or {}
    return (_words(example.question), *sorted(_words(text) for text in options.values()))


def _shingles(key: tuple[tuple[str, ...], ...], size: int) -> frozenset[tuple[str, ...]]:
    """Runs of ``size`` words within the question and within each option; a shorter text is one shingle."""
    return frozenset(
        words[start : start + size] for words in key for start in range(max(1, len(words) - size + 1))
    )


def _share_answer(one: Example, other: Example) -> bool:
    def answers(example: Example) -> set[tuple[str, ...]]:
        options = example.options or {}
        return {_words(options.get(answer, answer)) for answer in example.golden_answers}

    return not answers(one).isdisjoint(answers(other))


def _similar(
    left: Sequence[frozenset[tuple[str, ...]]], right: Sequence[frozenset[tuple[str, ...]]], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """(index left, index right, Jaccard) of every pair that reaches the threshold.

    If J(x, y) >= t then x and y share at least ceil(t |x|) elements, so in any common order the first shared one is
    among the first |x| - ceil(t |x|) + 1 of x, and likewise of y. Rare shingles come first: few candidates are left.
    """
    frequency = Counter(item for sets in (left, right) for items in sets for item in items)

    def prefix(items: frozenset[tuple[str, ...]]) -> list[tuple[str, ...]]:
        kept = len(items) - math.ceil(threshold * len(items) - 1e-9) + 1
        return sorted(items, key=lambda item: (frequency[item], item))[:kept]

    index = defaultdict(list)
    for position, items in enumerate(right):
        for item in prefix(items):
            index[item].append(position)
    for position, items in enumerate(left):
        candidates = {other for item in prefix(items) for other in index.get(item, ())}
        for other in sorted(candidates):
            shared = len(items & right[other])
            similarity = shared / (len(items) + len(right[other]) - shared)
            if similarity >= threshold - 1e-9:
                yield position, other, similarity
