"""What a server searches: a built index, or a corpus that is indexed when the server starts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from sorl_env.errors import UserError
from sorl_tools.corpus import SUFFIXES, Passage
from sorl_tools.index import Hit, Index, open_index
from sorl_tools.index.bm25 import Bm25Index
from sorl_tools.index.bm25_scorer import BatchScorer
from sorl_tools.index.cached import open_bm25, tokenize

# Above this, the index itself searches, which skips most postings (the MaxScore rule). The compiled scorer reads all of
# them: at a million passages it is still four times as fast, but its time grows with the corpus.
MAX_EXHAUSTIVE = 1 << 21
CACHED_PASSAGES = 1 << 14


class Backend(Protocol):
    """What one thread at a time searches."""

    @property
    def facts(self) -> dict[str, Any]:
        """What ``/health`` says about it; ``fingerprint`` identifies its content."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Sequence[Hit]]:
        """The hits of each query, best first."""
        ...

    def close(self) -> None: ...


class Bm25Backend:
    """BM25 with the compiled scorer. It finds the same as ``BM25Search``, in the same order and with the same scores.

    Args:
        passages: the passages that the postings are about.
        postings: an index that ``BatchScorer`` can read.
        fingerprint: identifies the content.
    """

    def __init__(self, passages: Sequence[Passage], postings: Any, fingerprint: str) -> None:
        # Reading a passage from the file takes as long as finding it, and the rollouts of a group find the same ones.
        self._passage = lru_cache(CACHED_PASSAGES)(passages.__getitem__)
        self._scorer = BatchScorer(postings)
        self.facts: dict[str, Any] = {
            "backend": "bm25",
            "fingerprint": fingerprint,
            "passages": len(passages),
        }

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The hits of each query, best first. A passage that shares no word with the query is never a hit."""
        found = self._scorer.top(tokenize(queries), top_k)
        return [[Hit(self._passage(doc), score) for doc, score in hits] for hits in found]

    def close(self) -> None:
        """There is nothing to close except memory-mapped files."""


class IndexBackend:
    """An index built by ``sorl-index``, which does the search itself."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.facts: dict[str, Any] = {
            "backend": index.manifest.backend,
            "fingerprint": index.manifest.hash,
            "passages": index.manifest.passages,
        }

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Sequence[Hit]]:
        """The hits of each query, best first."""
        return self._index.search(queries, top_k)

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def check_source(path: Path) -> None:
    """Raise UserError unless ``path`` looks like an index or a corpus; opens nothing."""
    if not path.exists():
        raise UserError(f"{path}: no such index or corpus; make one: sorl-index build CORPUS --out DIR")
    if path.is_file() and not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: cannot serve this file; give an index folder or a {' or '.join(SUFFIXES)}")


def open_backend(path: Path, *, model: str | None = None, device: str | None = None) -> Backend:
    """Open an index folder, or a corpus file, whose BM25 index is built once and kept in the cache folder.

    Args:
        model, device: for an index of vectors, see ``open_index``.

    Raises:
        UserError: it is neither, it cannot be read, or a model is given although nothing is embedded.
    """
    check_source(path)
    if path.is_file():
        _refuse_model(path, model, device)
        return Bm25Backend(*open_bm25(path))
    index = open_index(path, model=model, device=device)
    if not isinstance(index, Bm25Index):
        return IndexBackend(index)
    _refuse_model(path, model, device)
    if index.manifest.passages > MAX_EXHAUSTIVE:
        return IndexBackend(index)
    return Bm25Backend(index.passages, index.postings, index.manifest.hash)


def _refuse_model(path: Path, model: str | None, device: str | None) -> None:
    for name, value in (("model", model), ("device", device)):
        if value is not None:
            raise UserError(f"{name}={value}: BM25 of {path} embeds nothing; leave it out")
