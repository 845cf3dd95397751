"""A dense index that has been opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_tools.corpus import PassageFile
from sorl_tools.index.encoder import Encoder
from sorl_tools.index.faiss_kinds import FaissVectors, FlatVectors
from sorl_tools.index.hits import Hit, check_top_k
from sorl_tools.index.manifest import Manifest

FOLDER = "dense"


class DenseIndex:
    """Vectors that are searched by FAISS. A batch of queries is embedded at once; its size affects how scores are
    rounded.

    Args:
        model: folder or name of the embedding model, if it is not where the manifest says.
        device: torch device of the model.

    Raises:
        UserError: a file cannot be read, or the model is missing or is not the one that the index was built with.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, *, model: str | None = None, device: str | None = None
    ) -> None:
        self.manifest = manifest
        facts = manifest.parameters["dense"]
        compressed = folder / FOLDER / "index.faiss"
        try:
            self.passages = PassageFile(folder)
            self._vectors = (
                FaissVectors(compressed, dict(facts["settings"]))
                if facts["factory"]
                else FlatVectors(folder / FOLDER / "vectors.npy")
            )
        except (OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{folder}: cannot be opened ({error}); try sorl-index verify") from error
        self._encoder = Encoder(
            model or facts["model"],
            query_prefix=facts["query_prefix"],
            passage_prefix=facts["passage_prefix"],
            device=device,
        )
        if self._encoder.hash() != facts["model_hash"]:
            raise UserError(
                f"{self._encoder.name}: its weights differ from those of the model that {folder} was built with "
                f"({facts['model']}): name that model, or build the index again"
            )

    def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """For each query the best passages as (place in the corpus, score), best first."""
        if not queries:
            return []
        return self.rank_vectors(self._encoder.queries(queries), top_k)

    def rank_vectors(self, vectors: npt.NDArray[np.float32], top_k: int) -> list[list[tuple[int, float]]]:
        """As ``rank``, for queries that are embedded already, (queries, dim)."""
        found = self._vectors.search(vectors, top_k)
        return [list(zip(places.tolist(), scores.tolist(), strict=True)) for places, scores in found]

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See ``Index``."""
        check_top_k(top_k)
        return [
            [Hit(self.passages[place], score) for place, score in found]
            for found in self.rank(queries, top_k)
        ]

    def close(self) -> None:
        """See ``Index``."""
        self.passages.close()
