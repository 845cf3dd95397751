"""An index that has been opened: BM25, vectors, or both, over the same passages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage, PassageFile
from sorl_tools.index.manifest import Manifest, find_damage, read_manifest
from sorl_tools.index.words import Bm25, open_words

BM25, DENSE = "bm25", "dense"  # folders, and names of the parts in a manifest
Ranking = list[tuple[int, float]]  # (place in the corpus, score), best first

# Reading a passage from the file takes as long as finding it, and the rollouts of a group find the same ones.
CACHED_PASSAGES = 1 << 14


class Hit(NamedTuple):
    """A passage that was found. Scores can be compared within one query only; their scale depends on the backend."""

    passage: Passage
    score: float


class Index:
    """A folder built by ``sorl-index``, opened by ``open_index``. Threads may search one index at the same time."""

    def __init__(self, folder: Path, manifest: Manifest, model: str | None, device: str | None) -> None:
        self.manifest = manifest
        self.passages = PassageFile(folder)
        self._passage = lru_cache(CACHED_PASSAGES)(self.passages.__getitem__)
        if len(self.passages) != manifest.passages:
            raise ValueError(f"{len(self.passages)} passages, but {manifest.passages} in the manifest")
        parts = manifest.parameters
        self.words = Bm25(open_words(folder / BM25, manifest.passages)) if BM25 in parts else None
        self._vectors = None
        if DENSE in parts:
            from sorl_tools.index.vectors import DensePart

            self._vectors = DensePart(folder / DENSE, parts[DENSE], manifest.passages, model, device)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each query at most ``top_k`` passages, best first; equal scores in the order of the corpus.

        With BM25, a passage that shares no word with a query is never a hit. A batch of queries is embedded at once;
        its size affects how scores of vectors are rounded.

        Raises:
            UserError: ``top_k`` is less than 1, or the encoder does not answer.
        """
        if top_k < 1:
            raise UserError(f"top_k={top_k}: ask for 1 passage or more")
        top_k = min(top_k, self.manifest.passages)
        if not queries:
            return []
        parts = [part for part in (self.words, self._vectors) if part is not None]
        if len(parts) == 1:
            found = parts[0].top(queries, top_k)
        else:
            hybrid = self.manifest.parameters["hybrid"]
            depth = min(max(hybrid["depth"], top_k), self.manifest.passages)
            rankings = zip(*(part.top(queries, depth) for part in parts), strict=True)
            fused = (
                fuse([[place for place, _ in one] for one in both], hybrid["rrf_k"]) for both in rankings
            )
            found = [ranking[:top_k] for ranking in fused]
        return [[Hit(self._passage(place), score) for place, score in hits] for hits in found]

    def close(self) -> None:
        """Close the file of passages; the index cannot be searched afterwards."""
        self.passages.close()


def open_index(path: str | Path, *, model: str | None = None, device: str | None = None) -> Index:
    """Open a folder built by ``sorl-index``. Its files are memory-mapped, so processes share one copy of them.

    All files are read once and compared with their hashes, so a damaged index is refused and never searched.

    Args:
        path: the folder.
        model: folder or name of the embedding model, or address of its server, if it has moved since the build; BM25
            ignores it.
        device: torch device that embeds the queries, such as ``cuda:0``; None takes a GPU if there is one.

    Raises:
        UserError: there is no index, it is unfinished or damaged, or a package or model that it needs is missing.
    """
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    if damaged := find_damage(folder, manifest):
        raise UserError(
            f"{folder}: {', '.join(damaged)} changed since the build; copy it, or build the index, again"
        )
    try:
        return Index(folder, manifest, model, device)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be opened ({error}); build the index again") from error


def fuse(rankings: Sequence[Sequence[int]], rrf_k: int) -> Ranking:
    """Reciprocal rank fusion: (place, sum of ``1 / (rrf_k + rank)``), best first. Ranks count from 1; ties by place.

    >>> fuse([[7, 3], [3, 5]], rrf_k=1)
    [(3, 0.8333333333333333), (7, 0.5), (5, 0.3333333333333333)]
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, place in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (rrf_k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
