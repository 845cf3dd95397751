"""A hybrid index: the rankings of BM25 and of vectors, fused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sorl_tools.index.bm25 import Bm25Index
from sorl_tools.index.dense import DenseIndex
from sorl_tools.index.hits import Hit, check_top_k
from sorl_tools.index.manifest import Manifest


def fuse(rankings: Sequence[Sequence[int]], rrf_k: int) -> list[tuple[int, float]]:
    """Reciprocal rank fusion: (place, sum of ``1 / (rrf_k + rank)``), best first. Ranks count from 1; ties by place.

    >>> fuse([[7, 3], [3, 5]], rrf_k=1)
    [(3, 0.8333333333333333), (7, 0.5), (5, 0.3333333333333333)]
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, place in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (rrf_k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


class HybridIndex:
    """BM25 and vectors over the same passages. A passage may be a hit even if only one of them ranks it."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, model: str | None = None, device: str | None = None
    ) -> None:
        self.manifest = manifest
        self._words = Bm25Index(folder, manifest)
        self._vectors = DenseIndex(folder, manifest, model=model, device=device)
        self._rrf_k = int(manifest.parameters["hybrid"]["rrf_k"])
        self._depth = int(manifest.parameters["hybrid"]["depth"])

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See ``Index``. Scores are sums of ``1 / (rrf_k + rank)``."""
        check_top_k(top_k)
        depth = max(self._depth, top_k)
        found = []
        for query, by_vectors in zip(queries, self._vectors.rank(queries, depth), strict=True):
            by_words = self._words.rank(query, depth)
            fused = fuse([[place for place, _ in one] for one in (by_words, by_vectors)], self._rrf_k)
            found.append([Hit(self._words.passages[place], score) for place, score in fused[:top_k]])
        return found

    def close(self) -> None:
        """See ``Index``."""
        self._words.close()
        self._vectors.close()
