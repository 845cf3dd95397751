"""Build the posting lists of a BM25 index that need not fit into memory.

Words are counted in chunks of passages, into scratch files (``TokenScratch``). From these the lists are written one
block of words at a time (``write_postings``), each by a counting sort that reads the block's part of every chunk. The
scores are those of bm25s up to the rounding of float32. Memory holds the vocabulary, a few numbers for each passage,
and one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_tools.index.build.journal import Journal, npy_header
from sorl_tools.index.postings import DATA, INDICES, INDPTR, MAX_SCORES
from sorl_tools.index.words import Vocabulary, WordIds
from sorl_tools.progress import Progress

K1, B = 1.5, 0.75
CHUNK = 4096  # passages counted at a time; numbers of passages within a chunk are stored in 16 bits
BLOCK = 16_000_000  # postings sorted at a time, at 8 bytes each and some more
# scratch file -> type of its elements; the vocabulary is in words.txt
SCRATCH = {"terms": np.int32, "counts": np.int32, "docs": np.uint16, "tfs": np.uint32, "lengths": np.uint32}


class TokenScratch:
    """Counts the words of passages into files: for each chunk its different words, and for each word its passages.

    Args:
        journal: the files are in its folder.
        lengths: number of bytes of each file that the journal has recorded as complete.
    """

    def __init__(self, journal: Journal, lengths: Mapping[str, int]) -> None:
        self._words_file = journal.append_to(journal.folder / "words.txt", lengths.get("words", 0))
        self._files = {
            name: journal.append_to(journal.folder / f"{name}.bin", lengths.get(name, 0)) for name in SCRATCH
        }
        self._ids = WordIds((journal.folder / "words.txt").read_text(encoding="utf-8").split("\n")[:-1])

    def add(self, texts: Sequence[str]) -> None:
        """Count the words of a chunk of at most ``CHUNK`` texts."""
        ids = [self._ids.encode(text) for text in texts]
        self._ids.trim()
        self._words_file.write("".join(f"{stem}\n" for stem in self._ids.take_new()).encode())
        lengths = np.array([len(words) for words in ids], dtype=np.uint32)
        keys = np.concatenate(ids).astype(np.int64) * CHUNK + np.repeat(np.arange(len(ids)), lengths)
        keys, tfs = np.unique(keys, return_counts=True)  # by word, then by passage
        terms, counts = np.unique(keys // CHUNK, return_counts=True)
        chunk: dict[str, npt.NDArray[Any]] = {
            "terms": terms,
            "counts": counts,
            "docs": keys % CHUNK,
            "tfs": tfs,
            "lengths": lengths,
        }
        for name, dtype in SCRATCH.items():
            self._files[name].write(chunk[name].astype(dtype))

    def lengths(self) -> dict[str, int]:
        """Number of bytes of each file."""
        files = {"words": self._words_file, **self._files}
        return {name: file.length for name, file in files.items()}

    def close(self) -> None:
        for file in (self._words_file, *self._files.values()):
            file.close()


class _Counts:
    """Reads the scratch files: chunks of passages, each sorted by word."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        def read(name: str) -> npt.NDArray[Any]:
            path = folder / f"{name}.bin"
            if not path.stat().st_size:
                return np.zeros(0, dtype=np.int32)
            return np.asarray(np.memmap(path, dtype=SCRATCH[name], mode="r"))

        self.terms, self.counts, self.docs, self.tfs, lengths = (read(name) for name in SCRATCH)
        self.passage_lengths = lengths
        marks = [record["scratch"] for record in journal.records if record.get("stage") == "passages"]
        # chunk c is between marks c and c + 1
        self._terms_marks = [
            0,
            *(mark["terms"] // 4 for mark in marks),
        ]
        self._docs_marks = [0, *(mark["docs"] // 2 for mark in marks)]

    def frequencies(self, words: int) -> npt.NDArray[np.int64]:
        """The number of passages that contain each word, (words,)."""
        total = np.zeros(words, dtype=np.int64)
        for start, end in pairwise(self._terms_marks):
            total[self.terms[start:end]] += self.counts[start:end]  # a word occurs only once in a chunk
        return total

    def share(self, chunk: int, first: int, last: int) -> tuple[npt.NDArray[Any], ...]:
        """A chunk's words in ``first <= word < last``, their numbers of passages, those passages, and word counts."""
        start, end = self._terms_marks[chunk], self._terms_marks[chunk + 1]
        low, high = start + np.searchsorted(self.terms[start:end], [first, last])
        before = self._docs_marks[chunk] + int(self.counts[start:low].sum(dtype=np.int64))
        counts = self.counts[low:high].astype(np.int64)
        held = slice(before, before + int(counts.sum()))
        return self.terms[low:high], counts, self.docs[held], self.tfs[held]

    def __len__(self) -> int:
        return len(self._terms_marks) - 1


def write_postings(out: Path, journal: Journal, progress: Progress, k1: float, b: float) -> dict[str, Any]:
    """Write the vocabulary and the posting lists into ``out``; returns counts for the manifest.

    Raises:
        UserError: no passage has a word in it.
    """
    stems = (journal.folder / "words.txt").read_text(encoding="utf-8").split("\n")[:-1]
    counts = _Counts(journal.folder, journal)
    if not stems:
        raise UserError(f"nothing to search: {len(counts.passage_lengths)} passages without a word")
    out.mkdir(exist_ok=True)
    Vocabulary.write(stems, out)
    frequencies = counts.frequencies(len(stems))
    indptr = np.zeros(len(stems) + 1, dtype=np.int64)
    np.cumsum(frequencies, out=indptr[1:])
    np.save(out / INDPTR, indptr)
    lengths = counts.passage_lengths.astype(np.float64)
    total = len(lengths)
    idf = np.log(1 + (total - frequencies + 0.5) / (frequencies + 0.5))  # Lucene's
    norms = k1 * (1 - b + b * lengths / lengths.mean())
    _write_blocks(out, journal, progress, counts, indptr, idf.astype(np.float32), norms)
    return {"words": len(stems), "postings": int(indptr[-1]), "mean_length": float(lengths.mean())}


def _write_blocks(
    out: Path,
    journal: Journal,
    progress: Progress,
    counts: _Counts,
    indptr: npt.NDArray[np.int64],
    idf: npt.NDArray[np.float32],
    norms: npt.NDArray[np.float64],
) -> None:
    words, postings = len(idf), int(indptr[-1])
    headers = {name: npy_header((n,), dtype) for name, n, dtype in _outputs(words, postings)}
    first = int((journal.last("block") or {"words": 0})["words"])
    done = {name: int(indptr[first]) * 4 for name in (DATA, INDICES)} | {MAX_SCORES: first * 4}
    files = {
        name: journal.append_to(out / name, (len(headers[name]) + done[name]) if first else 0)
        for name in headers
    }
    for name, file in files.items():
        if not first:
            file.write(headers[name])
    progress.start("lists", postings, int(indptr[first]))
    while first < words:
        # as many whole lists as fit into a block; a longer list is a block of its own
        last = max(first + 1, int(np.searchsorted(indptr, indptr[first] + BLOCK, side="right")) - 1)
        passages, scores = _sort_block(counts, indptr, idf, norms, first, last)
        files[INDICES].write(passages)
        files[DATA].write(scores)
        files[MAX_SCORES].write(np.maximum.reduceat(scores, indptr[first:last] - indptr[first]))
        journal.add({"stage": "block", "words": last})
        progress.advance(len(scores))
        first = last
    for file in files.values():
        file.close()


def _outputs(words: int, postings: int) -> list[tuple[str, int, Any]]:
    return [(DATA, postings, np.float32), (INDICES, postings, np.int32), (MAX_SCORES, words, np.float32)]


def _sort_block(
    counts: _Counts,
    indptr: npt.NDArray[np.int64],
    idf: npt.NDArray[np.float32],
    norms: npt.NDArray[np.float64],
    first: int,
    last: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Passages and scores of the lists of ``first <= word < last``, one list after another."""
    size = int(indptr[last] - indptr[first])
    passages, scores = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.float32)
    heads = indptr[first:last] - indptr[first]  # where each list continues, (words of the block,)
    for chunk in range(len(counts)):
        terms, held_by, docs, tfs = counts.share(chunk, first, last)
        begins = np.cumsum(held_by) - held_by
        places = np.repeat(heads[terms - first] - begins, held_by) + np.arange(len(docs))
        found = docs.astype(np.int64) + chunk * CHUNK
        passages[places] = found
        scores[places] = np.repeat(idf[terms], held_by) * (tfs / (norms[found] + tfs))
        heads[terms - first] += held_by
    return passages, scores
