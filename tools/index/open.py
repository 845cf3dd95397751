"""The interface of an index for searching, and how an index is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index.manifest import Manifest, read_manifest


class Hit(NamedTuple):
    """A passage that was found. Scores can be compared within one query only; their scale depends on the backend."""

    passage: Passage
    score: float


class Index(Protocol):
    """A folder built by ``sorl-index``. Threads may search one index at the same time."""

    manifest: Manifest

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each query at most ``top_k`` passages, best first; equal scores in the order of the corpus.

        Raises:
            UserError: ``top_k`` is less than 1.
        """

    def close(self) -> None:
        """Close the files; the index cannot be searched afterwards."""


def open_index(path: str | Path, *, model: str | None = None, device: str | None = None) -> Index:
    """Open a folder built by ``sorl-index``. Its files are memory-mapped, so processes share one copy of them.

    Args:
        path: the folder.
        model: folder or name of the embedding model, if it has moved since the build; BM25 ignores it.
        device: torch device that embeds the queries, such as ``cuda:0``; None takes a GPU if there is one.

    Raises:
        UserError: there is no index, it is unfinished or damaged, or a package or model that it needs is missing.
    """
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    if manifest.backend == "bm25":
        from sorl_tools.index.bm25 import Bm25Index

        return Bm25Index(folder, manifest)
    from sorl_tools.index.dense import DenseIndex

    if manifest.backend == "dense":
        return DenseIndex(folder, manifest, model=model, device=device)
    if manifest.backend == "hybrid":
        from sorl_tools.index.hybrid import HybridIndex

        return HybridIndex(folder, manifest, model=model, device=device)
    raise UserError(f"{folder}: this version of sorl does not know the backend {manifest.backend!r}")


def check_top_k(top_k: int) -> None:
    """Raise UserError unless ``top_k`` is at least 1."""
    if top_k < 1:
        raise UserError(f"top_k={top_k}: ask for 1 passage or more")
