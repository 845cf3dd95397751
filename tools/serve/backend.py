"""What a server searches: a built index, or a corpus that is indexed when the server starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sorl_env.errors import UserError
from sorl_tools.corpus import SUFFIXES
from sorl_tools.index import Hit, Index, open_index
from sorl_tools.index.cached import open_bm25


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


class IndexBackend:
    """An index built by ``sorl-index``."""

    def __init__(self, index: Index, fingerprint: str) -> None:
        self._index = index
        self.facts: dict[str, Any] = {
            "backend": index.manifest.backend,
            "fingerprint": fingerprint,
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
        index, fingerprint = open_bm25(path)
    else:
        index = open_index(path, model=model, device=device)
        fingerprint = index.manifest.hash
    if index.manifest.backend == "bm25":
        for name, value in (("model", model), ("device", device)):
            if value is not None:
                raise UserError(f"{name}={value}: BM25 of {path} embeds nothing; leave it out")
    return IndexBackend(index, fingerprint)
