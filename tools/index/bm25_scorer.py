"""BM25 scores of whole batches, compiled by numba; it runs on one thread and releases Python's global lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sorl_env.folders import cache_folder

_SMALLEST = np.float32(np.finfo(np.float32).tiny)


class BatchScorer:
    """Finds the best passages of many queries in a bm25s index. Threads must not share one: it reuses its memory.

    It adds the same float32 numbers in the same order as bm25s, so its scores are equal to the last bit. It looks only
    at passages that share a word with the query, so the work grows with the postings of the query's words and not with
    the corpus. A second thread would not help, because adding the scores is limited by the speed of memory.

    Args:
        index: a bm25s index without scores for absent words (Lucene's BM25 has none).

    Raises:
        ModuleNotFoundError: numba is not installed.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self._kernel = _compiled()
        postings = index.scores
        self._postings = tuple(np.asarray(postings[name]) for name in ("data", "indices", "indptr"))
        num_docs = int(postings["num_docs"])
        self._scores = np.zeros(num_docs, dtype=np.float32)

    def top(self, queries: Sequence[Sequence[str]], top_k: int) -> list[list[tuple[int, float]]]:
        """(passage number, score) of the best passages of tokenized queries; equal scores keep the corpus order."""
        ids = [self._index.get_tokens_ids(words) for words in queries]
        starts = np.cumsum([0, *map(len, ids)])
        flat = np.fromiter((token for one in ids for token in one), dtype=np.int64, count=starts[-1])
        best = np.empty((len(ids), top_k), dtype=np.int32)  # (queries, top_k)
        best_scores = np.empty((len(ids), top_k), dtype=np.float32)
        counts = np.zeros(len(ids), dtype=np.int64)
        self._kernel(flat, starts, *self._postings, self._scores, best, best_scores, counts)
        rows = zip(best.tolist(), best_scores.tolist(), counts.tolist(), strict=True)
        return [list(zip(docs[:count], scores[:count], strict=True)) for docs, scores, count in rows]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The compiled kernel. Its machine code is kept in ``NUMBA_CACHE_DIR``, or beside the built indexes."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
    import numba

    return numba.njit(nogil=True, cache=True)(_top_k)


def _top_k(
    flat: Any,
    starts: Any,
    data: Any,
    indices: Any,
    indptr: Any,
    scores: Any,
    best: Any,
    best_scores: Any,
    counts: Any,
) -> None:
    """Write the result into the last three arguments. ``scores`` is all zeros before and after.

    It passes over the postings twice, once to add scores and once to pick the best, because then neither pass has a
    branch that is hard to predict. Indices are unsigned, because numba would check signed ones for negative values.
    """
    top_k = best.shape[1]
    for query in range(len(starts) - 1):
        for at in range(starts[query], starts[query + 1]):
            token = flat[at]
            for posting in range(np.uint64(indptr[token]), np.uint64(indptr[token + 1])):
                scores[np.uint32(indices[posting])] += data[posting]
        count = 0
        least = _SMALLEST  # the least score that gets in; a passage that was picked already has 0 left
        for at in range(starts[query], starts[query + 1]):
            token = flat[at]
            for posting in range(np.uint64(indptr[token]), np.uint64(indptr[token + 1])):
                doc = np.uint32(indices[posting])
                score = scores[doc]
                scores[doc] = 0
                if score < least:
                    continue
                place = count
                while place > 0 and (
                    score > best_scores[query, place - 1]
                    or (score == best_scores[query, place - 1] and doc < best[query, place - 1])
                ):
                    if place < top_k:
                        best_scores[query, place] = best_scores[query, place - 1]
                        best[query, place] = best[query, place - 1]
                    place -= 1
                if place < top_k:
                    best_scores[query, place] = score
                    best[query, place] = doc
                    count = min(count + 1, top_k)
                    if count == top_k:
                        least = best_scores[query, top_k - 1]
        counts[query] = count
