"""Words as numbers: a growing dictionary while an index is built, a sorted memory-mapped list afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# the default pattern of bm25s.tokenize; a test checks that they are equal
PATTERN = re.compile(r"(?u)\b\w\w+\b")
MAX_SPELLINGS = 2_000_000
STOP_WORD = -1


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


class WordIds(dict[str, int]):
    """Maps spellings to ids and grows with each new spelling. Ids count up in the order of first appearance.

    Args:
        stems: the stems that have ids already, in the order of their ids.
    """

    def __init__(self, stems: Sequence[str] = ()) -> None:
        super().__init__()
        self._stems = {stem: number for number, stem in enumerate(stems)}
        self._new: list[str] = []

    def __missing__(self, spelling: str) -> int:
        if spelling in stop_words():
            number = STOP_WORD
        else:
            stem = stemmer().stemWord(spelling)
            if stem not in self._stems:
                self._stems[stem] = len(self._stems)
                self._new.append(stem)
            number = self._stems[stem]
        self[spelling] = number
        return number

    def take_new(self) -> list[str]:
        """The stems that were added since the last call, in the order of their ids."""
        new, self._new = self._new, []
        return new

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of a text's words, in order, (words,)."""
        ids = np.array([self[word] for word in PATTERN.findall(text.lower())], dtype=np.int32)
        return ids[ids != STOP_WORD]

    def trim(self) -> None:
        """Drop the spellings when there are many, to save memory; they can be derived again."""
        if len(self) > MAX_SPELLINGS:
            self.clear()


class Vocabulary:
    """Finds a stem's id by bisection in a file: processes share its memory, and opening it takes no time.

    Raises:
        OSError: a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._text = np.memmap(folder / "words.txt", dtype=np.uint8, mode="r")
        self._starts = _plain(np.load(folder / "word_starts.npy", mmap_mode="r"))  # (words + 1,)
        self._ids = _plain(np.load(folder / "word_ids.npy", mmap_mode="r"))  # (words,)
        self.id = lru_cache(maxsize=1 << 16)(self._find)

    @staticmethod
    def write(stems: Sequence[str], folder: Path) -> None:
        """Write the files that the constructor reads. A stem's id is its place in ``stems``."""
        encoded = [stem.encode() for stem in stems]
        order = sorted(range(len(encoded)), key=encoded.__getitem__)
        starts = np.zeros(len(encoded) + 1, dtype=np.int64)
        with (folder / "words.txt").open("wb") as file:
            for place, number in enumerate(order):
                starts[place + 1] = starts[place] + file.write(encoded[number] + b"\n")
        np.save(folder / "word_starts.npy", starts)
        np.save(folder / "word_ids.npy", np.asarray(order, dtype=np.int32))

    def __len__(self) -> int:
        return len(self._ids)

    def _find(self, stem: str) -> int | None:
        wanted = stem.encode(errors="replace")  # a lone surrogate cannot be encoded, and is in no word
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            found = self._text[self._starts[middle] : self._starts[middle + 1] - 1].tobytes()
            if found == wanted:
                return int(self._ids[middle])
            if found < wanted:
                low = middle + 1
            else:
                high = middle
        return None


def query_stems(query: str) -> list[str]:
    """The words of a query as stems, without stop words."""
    left_out = stop_words()
    return stemmer().stemWords([word for word in PATTERN.findall(query.lower()) if word not in left_out])


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A plain view, which slices faster than an np.memmap; it keeps the file mapped."""
    return np.asarray(array)
