"""How an index is opened, whichever its backend."""

from __future__ import annotations

from pathlib import Path

from sorl_env.errors import UserError
from sorl_tools.index.hits import Index
from sorl_tools.index.manifest import read_manifest


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
