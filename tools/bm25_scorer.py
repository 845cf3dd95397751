"""BM25 scores of whole batches, compiled by numba: one thread, no lock on the interpreter while it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sorl_tools.corpus import cache_dir


class BatchScorer:
    """The best passages of many queries over a bm25s index. Not for several threads at a time: it reuses its memory.

    It adds up the same float32 numbers in the same order as bm25s, so scores are equal to the last bit. Only passages
    that share a word with the query are looked at, so the work of a query grows with its words' postings, and not with
    the corpus. A second thread gains nothing: adding up scores is bound by memory.

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
        self._touched = np.zeros(num_docs, dtype=np.int32)

    def top(self, queries: Sequence[Sequence[str]], top_k: int) -> list[list[tuple[int, float]]]:
        """Passage numbers and scores of tokenized queries, best first; ties keep the order of the corpus."""
        ids = [self._index.get_tokens_ids(words) for words in queries]
        starts = np.cumsum([0, *map(len, ids)])
        flat = np.fromiter((token for one in ids for token in one), dtype=np.int64, count=starts[-1])
        best = np.empty((len(ids), top_k), dtype=np.int32)  # (queries, top_k)
        best_scores = np.empty((len(ids), top_k), dtype=np.float32)
        counts = np.zeros(len(ids), dtype=np.int64)
        self._kernel(flat, starts, *self._postings, self._scores, self._touched, best, best_scores, counts)
        rows = zip(best.tolist(), best_scores.tolist(), counts.tolist(), strict=True)
        return [list(zip(docs[:count], scores[:count], strict=True)) for docs, scores, count in rows]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The kernel; machine code is kept on disk, in ``NUMBA_CACHE_DIR`` or next to the built indexes."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir() / "numba"))
    import numba

    return numba.njit(nogil=True, cache=True)(_top_k)


def _top_k(
    flat: Any,
    starts: Any,
    data: Any,
    indices: Any,
    indptr: Any,
    scores: Any,
    touched: Any,
    best: Any,
    best_scores: Any,
    counts: Any,
) -> None:
    """``scores`` is all zeros before and after; ``touched`` is scratch; the last three are the result."""
    top_k = best.shape[1]
    for query in range(len(starts) - 1):
        num_touched = 0
        for token in flat[starts[query] : starts[query + 1]]:
            for posting in range(indptr[token], indptr[token + 1]):
                doc = indices[posting]
                if scores[doc] == 0 and data[posting] > 0:
                    touched[num_touched] = doc
                    num_touched += 1
                scores[doc] += data[posting]
        count = 0
        for slot in range(num_touched):
            doc = touched[slot]
            score = scores[doc]
            scores[doc] = 0
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
        counts[query] = count
