"""What a user chooses for a build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sorl_tools.index.build.bm25 import K1, B

DENSE = "dense"


@dataclass(frozen=True)
class Bm25Options:
    """BM25's parameters. The recall figures of docs/search.md were measured with these defaults."""

    k1: float = K1
    b: float = B


@dataclass(frozen=True)
class DenseOptions:
    """How passages become vectors, and how these are searched.

    Args:
        model: a model folder of sentence-transformers, or a name that it finds.
        query_prefix: text before a query; None takes it from the model's configuration or name (E5's are known).
        passage_prefix: text before a passage, likewise.
        vectors: a .npy file of the passages' vectors, (passages, dim) float32, computed earlier with this model.
        faiss: a kind of ``faiss_kinds.KINDS``, or a factory string of FAISS.
        batch_size: passages embedded at a time.
        device: torch device of the model; None takes a GPU if there is one.
        keep_vectors: keep the float32 vectors in the folder beside a compressed index.
    """

    model: str = ""
    query_prefix: str | None = None
    passage_prefix: str | None = None
    vectors: Path | None = None
    faiss: str = "flat"
    batch_size: int = 64
    device: str | None = None
    keep_vectors: bool = False


@dataclass(frozen=True)
class HybridOptions:
    """Reciprocal rank fusion: a passage scores ``1 / (rrf_k + rank)`` in each part where its rank is at most ``depth``.

    The usual ``rrf_k`` of 60 is for long result lists. An agent reads three passages; with 1, the first of each part is
    among them.
    """

    rrf_k: int = 1
    depth: int = 100
