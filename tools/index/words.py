"""BM25 of bm25s: its words, its files, and a compiled scorer over them that looks at no passage in vain."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.errors import UserError
from sorl_env.folders import cache_folder
from sorl_tools.corpus import Passage

PATTERN = re.compile(r"(?u)\b\w\w+\b")  # the default of bm25s.tokenize; a test checks that they are equal
_SMALLEST = np.float32(np.finfo(np.float32).tiny)


@lru_cache(maxsize=1)
def stop_words() -> frozenset[str]:
    """The English words that are not indexed."""
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)


@lru_cache(maxsize=1)
def stemmer() -> Any:
    """Snowball's stemmer for English."""
    import Stemmer

    return Stemmer.Stemmer("english")


def tokenize(text: str) -> list[str]:
    """Lower-case words of two letters and more, stemmed and without stop words, exactly as ``bm25s.tokenize``."""
    left_out = stop_words()
    return stemmer().stemWords([word for word in PATTERN.findall(text.lower()) if word not in left_out])


def index_words(passages: Sequence[Passage]) -> Any:
    """A ``bm25s.BM25`` of titles and texts, in memory. Raises ``UserError`` if no passage has a word in it."""
    import bm25s

    words = [tokenize(f"{passage.title}\n{passage.text}") for passage in passages]
    if not any(words):
        raise UserError(f"nothing to search: {len(passages)} passages without a word")
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return index


def open_words(folder: Path, passages: int) -> Any:
    """A ``bm25s.BM25`` that was saved; its postings are memory-mapped, so processes share one copy of them. Raises
    ``ValueError`` if the postings belong to another number of passages, and ``OSError`` if a file cannot be read."""
    import bm25s

    index = bm25s.BM25.load(folder, mmap=True)
    # plain views slice faster than np.memmap, and keep the file mapped
    arrays = {name: np.asarray(index.scores[name]) for name in ("data", "indices", "indptr")}
    index.scores |= arrays
    data, indices, indptr = arrays.values()
    words = len(indptr) - 1
    # compiled code and numpy do not look where they read and write, so this has to hold
    if (
        [array.dtype.str for array in arrays.values()] not in (["<f4", "<i4", "<i4"], ["<f4", "<i4", "<i8"])
        or [array.ndim for array in arrays.values()] != [1, 1, 1]
        or not (words > 0 and indptr[0] == 0 and indptr[-1] == len(data) == len(indices) > 0)
        or (np.diff(indptr) < 0).any()
        or not 0 <= indices.min() <= indices.max() < passages == index.scores["num_docs"]
        or not all(isinstance(one, int) and 0 <= one < words for one in index.vocab_dict.values())
    ):
        raise ValueError("postings or a vocabulary that point outside of the index")
    return index


class Bm25:
    """Finds the best passages in a bm25s index. Threads may share one; each has its own sums. The compiled search adds
    the same float32 numbers in the same order as bm25s, so its scores are equal to the last bit. It looks only at
    passages that share a word with the query, so its work grows with the postings of the query's words and not with the
    corpus, and equal scores keep the order of the corpus; bm25s' own compiled search does neither. A second thread
    would not make a query faster: adding scores is limited by the speed of memory. ``index`` is a bm25s index without
    scores for absent words (Lucene's BM25 has none)."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self._postings = tuple(np.asarray(index.scores[name]) for name in ("data", "indices", "indptr"))
        self._local = threading.local()

    def best(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """(passage number, score) of the best passages of a query, by numpy: no second of compilation before."""
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(tokenize(query)))
        found: list[tuple[int, float]] = []
        for _ in range(min(top_k, len(scores))):
            place = int(scores.argmax())  # the first of equals
            if not scores[place] > 0:
                break
            found.append((place, float(scores[place])))
            scores[place] = 0
        return found

    def top(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """What ``best`` finds for each query, by compiled code if numba is installed."""
        kernel = _compiled()
        if kernel is None:
            return [self.best(query, top_k) for query in queries]
        if not hasattr(self._local, "sums"):
            self._local.sums = np.zeros(int(self._index.scores["num_docs"]), dtype=np.float32)
        ids = [self._index.get_tokens_ids(tokenize(query)) for query in queries]
        starts = np.cumsum([0, *map(len, ids)])
        flat = np.fromiter((token for one in ids for token in one), dtype=np.int64, count=starts[-1])
        best = np.empty((len(ids), top_k), dtype=np.int32)  # (queries, top_k)
        best_scores = np.empty((len(ids), top_k), dtype=np.float32)
        counts = np.zeros(len(ids), dtype=np.int64)
        kernel((flat, starts), self._postings, self._local.sums, best, best_scores, counts)
        rows = zip(best.tolist(), best_scores.tolist(), counts.tolist(), strict=True)
        return [list(zip(docs[:count], scores[:count], strict=True)) for docs, scores, count in rows]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The compiled kernel, or None. Its machine code is kept in ``NUMBA_CACHE_DIR``, or beside the built indexes."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
    try:
        import numba
    except ModuleNotFoundError:
        return None

    return numba.njit(nogil=True, cache=True)(_top_k)


def _top_k(query_words: Any, postings: Any, sums: Any, best: Any, best_scores: Any, counts: Any) -> None:
    """Write the result into the last three arguments. ``sums`` is all zeros before and after. It passes over the
    postings twice, once to add scores and once to pick the best, because then neither pass has a branch that is hard to
    predict. Indices are unsigned, because numba would check signed ones for negative values."""
    flat, starts = query_words
    data, indices, indptr = postings
    top_k = best.shape[1]
    for query in range(len(starts) - 1):
        for at in range(starts[query], starts[query + 1]):
            token = flat[at]
            for posting in range(np.uint64(indptr[token]), np.uint64(indptr[token + 1])):
                sums[np.uint32(indices[posting])] += data[posting]
        count = 0
        least = _SMALLEST  # the least score that gets in; a passage that was picked already has 0 left
        for at in range(starts[query], starts[query + 1]):
            token = flat[at]
            for posting in range(np.uint64(indptr[token]), np.uint64(indptr[token + 1])):
                doc = np.uint32(indices[posting])
                score = sums[doc]
                sums[doc] = 0
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
