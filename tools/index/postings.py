"""BM25 by precomputed scores: for each word the passages that contain it and their scores (the layout of bm25s)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_tools.index.words import Vocabulary

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

DATA, INDICES, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
MAX_SCORES = "max_scores.npy"
SLACK = np.float32(1 - 1e-4)  # sums of the same float32 in another order differ by less
# Up to so many passages all are scored: finding out which to skip would cost more than it saves.
PLAIN = 1 << 19
LOOKUP_COST = 16  # looking up one passage by bisection costs about as much as adding up so many


class Postings:
    """The posting lists of an index, memory-mapped. Threads may share it; each has its own array of partial sums.

    The scores of a query's rare words are added first. At some point the remaining words together cannot lift a passage
    without any of the rare words into the best k. From then on their long lists are not read: only the passages that
    can still win are looked up in them (the MaxScore rule). The result is exact, because the best passages are scored
    again,

    Args:
        folder: holds ``data``, ``indices`` and ``indptr`` as bm25s saves them, ``max_scores.npy`` and the vocabulary.
        passages: number of passages in the index.
    """

    def __init__(self, folder: Path, passages: int) -> None:
        self.passages = passages
        self.vocabulary = Vocabulary(folder)
        self.data: Floats = np.asarray(np.load(folder / DATA, mmap_mode="r"))
        self.indices: npt.NDArray[np.int32] = np.asarray(np.load(folder / INDICES, mmap_mode="r"))
        self.indptr: Ints = np.asarray(np.load(folder / INDPTR, mmap_mode="r"))
        self._max_scores: Floats = np.asarray(np.load(folder / MAX_SCORES, mmap_mode="r"))
        self._local = threading.local()

    @property
    def scores(self) -> dict[str, Any]:
        """The arrays under the names that they have in a ``bm25s.BM25``."""
        arrays = {"data": self.data, "indices": self.indices, "indptr": self.indptr}
        return {**arrays, "num_docs": self.passages}

    def get_tokens_ids(self, stems: Sequence[str]) -> list[int]:
        """Ids of the stems that are in the index, repetitions included."""
        ids = (self.vocabulary.id(stem) for stem in stems)
        return [number for number in ids if number is not None]

    def get_scores_from_ids(self, words: Sequence[int]) -> Floats:
        """The score of every passage, (passages,)."""
        scores = np.zeros(self.passages, dtype=np.float32)
        for word in words:
            docs, values = self._list(word)
            scores[docs] += values  # a passage occurs only once in a list
        return scores

    def best(self, words: Sequence[int], top_k: int) -> tuple[Ints, Floats]:
        """The best ``top_k`` passages that share a word with the query, and their scores, (found,) each."""
        if self.passages <= PLAIN and top_k <= 32:
            return largest(self.get_scores_from_ids(words), top_k)
        candidates = self._candidates(words, top_k)
        scores = np.zeros(len(candidates), dtype=np.float32)
        for word in words:
            self._add(word, candidates, scores)
        order = np.lexsort((candidates, -scores))[:top_k]
        return candidates[order], scores[order]

    def _list(self, word: int) -> tuple[npt.NDArray[np.int32], Floats]:
        start, end = self.indptr[word], self.indptr[word + 1]
        return self.indices[start:end], self.data[start:end]

    def _add(self, word: int, candidates: Ints, scores: Floats, times: int = 1) -> None:
        """Look candidates up in a word's list, and add its part to their scores."""
        docs, values = self._list(word)
        if not len(docs):
            return
        places = np.minimum(np.searchsorted(docs, candidates), len(docs) - 1)
        held = docs[places] == candidates
        scores[held] += values[places[held]] * np.float32(times)

    def _candidates(self, words: Sequence[int], top_k: int) -> Ints:
        """Passages that include the best ``top_k``, in the order of the corpus."""
        distinct, times = np.unique(np.asarray(words, dtype=np.int64), return_counts=True)
        lengths = self.indptr[distinct + 1] - self.indptr[distinct]
        order = np.argsort(lengths, kind="stable")
        distinct, times, lengths = distinct[order], times[order], lengths[order]
        most = self._max_scores[distinct] * times
        # the most that the words from here on can add, (words + 1,)
        rest = np.append(np.cumsum(most[::-1])[::-1], 0.0)
        sums = self._partial_sums()
        touched: list[npt.NDArray[np.int32]] = []
        alive = np.zeros(0, dtype=np.int64)
        try:
            for i, word in enumerate(distinct):
                docs, values = self._list(int(word))
                before = sums[docs]
                touched.append(docs[before == 0])
                sums[docs] = before + values * np.float32(times[i])
                if rest[i + 1] > most[: i + 1].sum() and i + 1 < len(distinct):
                    continue  # the remaining words could still lift any passage
                found = np.concatenate(touched)
                alive, scores, ahead = _in_the_race(found, sums[found], top_k, float(rest[i + 1]))
                if ahead and len(alive) * LOOKUP_COST * (len(distinct) - i - 1) <= lengths[i + 1 :].sum():
                    for word, times_i in zip(distinct[i + 1 :], times[i + 1 :], strict=True):
                        self._add(int(word), alive, scores, int(times_i))
                    alive = _in_the_race(alive, scores, top_k, 0.0)[0]
                    break
        finally:
            for docs in touched:
                sums[docs] = 0
        return np.sort(alive)

    def _partial_sums(self) -> Floats:
        sums: Floats | None = getattr(self._local, "sums", None)
        if sums is None:
            sums = self._local.sums = np.zeros(self.passages, dtype=np.float32)
        return sums


def largest(scores: Floats, top_k: int) -> tuple[Ints, Floats]:
    """The places and values of the ``top_k`` largest positive scores, largest first; overwrites ``scores``."""
    places, values = [], []
    for _ in range(min(top_k, len(scores))):
        best = int(scores.argmax())  # the first of equals
        if scores[best] <= 0:
            break
        places.append(best)
        values.append(scores[best])
        scores[best] = 0
    return np.array(places, dtype=np.int64), np.array(values, dtype=np.float32)


def _in_the_race(
    found: npt.NDArray[np.integer], sums: Floats, top_k: int, rest: float
) -> tuple[Ints, Floats, bool]:
    """Passages of ``found`` that can still be among the best, their sums, and whether no other passage can.

    Args:
        found: passages, (n,), each once.
        sums: their scores so far, (n,).
        rest: the most that the words not yet added can add to any passage.
    """
    if len(found) <= top_k:
        return found.astype(np.int64), sums, rest == 0
    worst = np.partition(sums, -top_k)[-top_k]
    keep = sums + np.float32(rest) >= worst * SLACK
    return found[keep].astype(np.int64), sums[keep], bool(worst * SLACK > rest)
