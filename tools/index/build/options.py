"""What a user chooses for a build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bm25Options:
    """BM25's parameters. The recall figures of docs/search.md were measured with these defaults."""

    k1: float = 1.5
    b: float = 0.75


@dataclass(frozen=True)
class DenseOptions:
    """How passages become vectors, and how these are searched.

    Args:
        model: a model folder of sentence-transformers, or a name that it or the ``encoder`` finds.
        encoder: address of a server with OpenAI's embeddings API, which embeds instead of sentence-transformers.
        query_prefix: text before a query; None takes it from the model's configuration or name (E5's are known).
        passage_prefix: text before a passage, likewise.
        vectors: a .npy file of the passages' vectors, (passages, dim) float32, computed earlier with this model.
        faiss: a kind of ``vectors.KINDS``, or a factory string of FAISS.
        batch_size: passages embedded at a time.
        device: torch device of the model; None takes a GPU if there is one.
    """

    model: str = ""
    encoder: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    vectors: Path | None = None
    faiss: str = "flat"
    batch_size: int = 64
    device: str | None = None


@dataclass(frozen=True)
class HybridOptions:
    """Reciprocal rank fusion: a passage scores ``1 / (rrf_k + rank)`` in each part where its rank is at most ``depth``.

    The usual ``rrf_k`` of 60 is for long result lists. An agent reads three passages; with 1, the first of each part is
    among them.
    """

    rrf_k: int = 1
    depth: int = 100
