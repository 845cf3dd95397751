"""What an index is to those who search it, and how one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index.manifest import Manifest, read_manifest


class Hit(NamedTuple):
    """A passage that was found. Scores compare within one query; their scale is the backend's own."""

    passage: Passage
    score: float


class Index(Protocol):
    """A folder built by ``sorl-index``. Threads may search one index at the same time."""

    manifest: Manifest

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each query its ``top_k`` passages or fewer, the best first, equal scores in the order of the corpus.

        Raises:
            UserError: ``top_k`` is less than 1.
        """

    def close(self) -> None:
        """Let go of the files; searching afterwards is an error."""


def open_index(path: str | Path, *, model: str | None = None, device: str | None = None) -> Index:
    """Open a folder built by ``sorl-index``. The files are memory-mapped: processes share one copy of them.

    Args:
        path: the folder.
        model: where the embedding model is now, when it is no longer where it was at the build; BM25 ignores it.
        device: torch device that embeds the queries, as ``cuda:0``; when None, a GPU if there is one.

    Raises:
        UserError: no index there, it is unfinished or damaged, or it needs a package or a model that is missing.
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
    raise UserError(f"{folder}: backend {manifest.backend!r} is not known to this version of sorl")


def check_top_k(top_k: int) -> None:
    """Raise UserError unless ``top_k`` is a number of passages."""
    if top_k < 1:
        raise UserError(f"top_k={top_k}: ask for 1 passage or more")
