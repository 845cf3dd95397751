"""What a server searches: a built index, or a corpus that is indexed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sorl_env.errors import UserError
from sorl_tools.bm25_index import open_index as open_bm25
from sorl_tools.bm25_index import tokenize
from sorl_tools.bm25_scorer import BatchScorer
from sorl_tools.corpus import SUFFIXES, Passage
from sorl_tools.serve.protocol import Hit


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


class CorpusBackend:
    """BM25 over a ``.jsonl`` or ``.jsonl.gz`` corpus, whose index is built once and memory-mapped (``bm25_index``).

    Finds what ``BM25Search`` finds, in its order and with its scores.

    Raises:
        UserError: the corpus cannot be read, or the cache folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._passages, index, fingerprint = open_bm25(path)
        self._scorer = BatchScorer(index)
        self.facts: dict[str, Any] = {
            "backend": "bm25",
            "fingerprint": fingerprint,
            "passages": len(self._passages),
        }

    def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """Hits of each query, best first; a passage that shares no word with the query is never one of them."""
        found = self._scorer.top(tokenize(queries), top_k)
        return [[ScoredPassage(self._passages[doc], score) for doc, score in hits] for hits in found]

    def close(self) -> None:
        """Nothing is open but maps of files."""


class IndexBackend:
    """An index that ``sorl-index`` has built.

    Raises:
        UserError: the folder holds no whole index.
    """

    def __init__(self, path: Path) -> None:
        from sorl_tools.index import open_index

        self._index = open_index(path)
        manifest = self._index.manifest
        self.facts: dict[str, Any] = {
            "backend": manifest.backend,
            "fingerprint": manifest.hash,
            "passages": manifest.passages,
            "corpus": manifest.corpus["hash"],
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


def open_backend(path: Path) -> Backend:
    """A folder is an index, a file is a corpus.

    Raises:
        UserError: it is neither, or cannot be read.
    """
    check_source(path)
    return IndexBackend(path) if path.is_dir() else CorpusBackend(path)
