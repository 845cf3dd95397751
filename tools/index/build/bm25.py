"""Build a bm25s index from chunks of passages, with the words in compact arrays.

``bm25s.BM25().index`` holds every word of the corpus as a Python object, which takes 4 GB for a million passages. Here
a posting takes 4 bytes, and the lists are written some words at a time; the scores are the same up to the rounding of
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_tools.index.words import PATTERN, stemmer, stop_words

CHUNK = 4096  # passages counted at a time; their numbers within a chunk are stored in 16 bits
PART = 2**23  # postings that are written at a time, and at most one word's more
MAX_SPELLINGS = 2_000_000
MAX_COUNT = 2**16 - 1  # of one word in a passage
STOP_WORD = -1


class WordIds(dict[str, int]):
    """Maps spellings to the ids of their stems, which count up in the order of first appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.stems: dict[str, int] = {}

    def __missing__(self, spelling: str) -> int:
        stem = stemmer().stemWord(spelling)
        number = STOP_WORD if spelling in stop_words() else self.stems.setdefault(stem, len(self.stems))
        self[spelling] = number
        return number

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of a text's words, in order, (words,)."""
        ids = np.array([self[word] for word in PATTERN.findall(text.lower())], dtype=np.int32)
        return ids[ids != STOP_WORD]


class PostingsBuilder:
    """Counts the words of passages, chunk by chunk, and then writes all posting lists at once."""

    def __init__(self) -> None:
        self._ids = WordIds()
        # by chunk: its different words, the number of passages of each, and then those passages and their counts
        self._chunks: list[tuple[npt.NDArray[Any], ...]] = []
        self._lengths: list[npt.NDArray[np.uint32]] = []

    def add(self, texts: Sequence[str]) -> None:
        """Count the words of a chunk of at most ``CHUNK`` texts."""
        ids = [self._ids.encode(text) for text in texts]
        if len(self._ids) > MAX_SPELLINGS:  # they can be derived again
            self._ids.clear()
        lengths = np.array([len(words) for words in ids], dtype=np.uint32)
        keys = np.concatenate(ids).astype(np.int64) * CHUNK + np.repeat(np.arange(len(ids)), lengths)
        keys, counts = np.unique(keys, return_counts=True)  # by word, then by passage
        words, held_by = np.unique(keys // CHUNK, return_counts=True)
        docs = (keys % CHUNK).astype(np.uint16)
        counts = np.minimum(counts, MAX_COUNT).astype(np.uint16)
        self._chunks.append((words.astype(np.int32), held_by.astype(np.int32), docs, counts))
        self._lengths.append(lengths)

    def write(self, out: Path, k1: float, b: float) -> dict[str, Any]:
        """Save the index; returns the manifest's parameters. Raises ``UserError`` if no passage has a word in it."""
        import bm25s

        self._ids.clear()  # the stems suffice
        lengths = np.concatenate(self._lengths).astype(np.float64)
        stems, passages = self._ids.stems, len(lengths)
        if not stems:
            raise UserError(f"nothing to search: {passages} passages without a word")
        frequencies = np.zeros(len(stems), dtype=np.int64)  # passages that contain each word, (words,)
        for words, held_by, _, _ in self._chunks:
            frequencies[words] += held_by  # a word occurs only once in a chunk
        indptr = np.concatenate([[0], np.cumsum(frequencies)])
        idf = np.log(1 + (passages - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)  # Lucene's
        norms = k1 * (1 - b + b * lengths / lengths.mean())  # (passages,)
        ends = np.searchsorted(indptr, np.arange(PART, indptr[-1], PART))
        parts = [out / "indices.part", out / "data.part"]
        out.mkdir(parents=True, exist_ok=True)
        with parts[0].open("wb") as indices_file, parts[1].open("wb") as data_file:
            for first, last in pairwise(np.unique([0, *ends, len(stems)])):
                indices, data = self._lists(first, last, indptr, idf, norms)
                indices.tofile(indices_file)
                data.tofile(data_file)
        index = bm25s.BM25(k1=k1, b=b)
        index.nonoccurrence_array = None  # Lucene's BM25 has no scores for absent words
        indices, data = np.memmap(parts[0], np.int32, "r"), np.memmap(parts[1], np.float32, "r")
        index.scores = {"data": data, "indices": indices, "indptr": indptr, "num_docs": passages}
        index.vocab_dict = stems
        index.save(out, show_progress=False)
        for path in parts:
            path.unlink()
        facts = {"k1": k1, "b": b, "method": "lucene", "stemmer": "english", "words": len(stems)}
        return {**facts, "postings": int(indptr[-1]), "mean_length": float(lengths.mean())}

    def _lists(
        self,
        first: int,
        last: int,
        indptr: npt.NDArray[np.int64],
        idf: npt.NDArray[np.float32],
        norms: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The passages and the scores of the words from ``first`` up to ``last``, (postings of these words,)."""
        size = indptr[last] - indptr[first]
        indices, data = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.float32)
        heads = indptr[first:last] - indptr[first]  # where each list continues, (words,)
        for chunk, (words, held_by, docs, counts) in enumerate(self._chunks):
            begin, end = np.searchsorted(words, (first, last))
            starts = np.concatenate([[0], np.cumsum(held_by[:end])])
            mine = slice(starts[begin], starts[end])  # a chunk's postings are sorted by word
            words, held_by = words[begin:end], held_by[begin:end]
            found = docs[mine].astype(np.int64) + chunk * CHUNK
            places = np.repeat(heads[words - first] - starts[begin:end], held_by) + np.arange(
                *starts[[begin, end]]
            )
            indices[places] = found
            data[places] = np.repeat(idf[words], held_by) * (counts[mine] / (norms[found] + counts[mine]))
            heads[words - first] += held_by
        return indices, data
