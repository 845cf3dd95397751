"""What a server searches: a built index, or a corpus that is indexed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sorl_env.errors import UserError
from sorl_tools.corpus import SUFFIXES, Passage
from sorl_tools.index import Index, open_index
from sorl_tools.index.bm25 import Bm25Index
from sorl_tools.index.bm25_scorer import BatchScorer
from sorl_tools.index.cached import open_index as open_bm25
from sorl_tools.index.cached import tokenize
from sorl_tools.serve.protocol import Hit

# Beyond it an index skips most of its postings (the MaxScore rule), which the compiled scorer reads one and all: four
# times as fast at a million passages all the same, in time that grows with them.
MAX_EXHAUSTIVE = 1 << 21
CACHED_PASSAGES = 1 << 14


class Backend(Protocol):
    """Searched by one thread at a time."""

    @property
    def facts(self) -> dict[str, Any]:
        """What ``/health`` says of it; ``fingerprint`` names its content."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Sequence[Hit]]:
        """Hits of each query, best first."""
        ...

    def close(self) -> None: ...


class ScoredPassage(NamedTuple):
    """A passage and its score."""

    passage: Passage
    score: float


class Bm25Backend:
    """BM25 by the compiled scorer: finds what ``BM25Search`` finds, in its order and with its scores.

    Args:
        passages: what the postings are of.
        postings: as ``BatchScorer`` reads them.
        fingerprint: names the content.
    """

    def __init__(self, passages: Sequence[Passage], postings: Any, fingerprint: str) -> None:
        # to read a passage off the map takes as long as to find it, and the rollouts of a group find the same ones
        self._passage = lru_cache(CACHED_PASSAGES)(passages.__getitem__)
        self._scorer = BatchScorer(postings)
        self.facts: dict[str, Any] = {
            "backend": "bm25",
            "fingerprint": fingerprint,
            "passages": len(passages),
        }

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """Hits of each query, best first; a passage that shares no word with the query is never one of them."""
        found = self._scorer.top(tokenize(queries), top_k)
        return [[ScoredPassage(self._passage(doc), score) for doc, score in hits] for hits in found]

    def close(self) -> None:
        """Nothing is open but maps of files."""


class IndexBackend:
    """An index that ``sorl-index`` has built, searched as it searches itself."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.facts: dict[str, Any] = {
            "backend": index.manifest.backend,
            "fingerprint": index.manifest.hash,
            "passages": index.manifest.passages,
        }

    def search(self, queries: Sequence[str], top_k: int) -> Sequence[Sequence[Hit]]:
        """Hits of each query, best first."""
        return self._index.search(queries, top_k)

    def close(self) -> None:
        """Close the index."""
        self._index.close()


def check_source(path: Path) -> None:
    """Raise UserError unless ``path`` looks like something to serve; opens nothing."""
    if not path.exists():
        raise UserError(
            f"{path}: no such index or corpus; build an index with: sorl-index build CORPUS --out DIR"
        )
    if path.is_file() and not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: cannot serve this file; give an index folder or a {' or '.join(SUFFIXES)}")


def open_backend(path: Path, *, model: str | None = None, device: str | None = None) -> Backend:
    """A folder is an index; a file is a corpus, whose BM25 index is built once and kept in the cache folder.

    Args:
        model, device: of an index of vectors, see ``open_index``.

    Raises:
        UserError: it is neither, cannot be read, or has no use for a model that is given.
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
