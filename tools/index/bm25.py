"""A BM25 index that has been opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sorl_env.errors import UserError
from sorl_tools.corpus import PassageFile
from sorl_tools.index.hits import Hit, check_top_k
from sorl_tools.index.manifest import Manifest
from sorl_tools.index.postings import Postings
from sorl_tools.index.words import query_stems

FOLDER = "bm25"


class Bm25Index:
    """Lucene's BM25 with English stemming and stop words. A passage that shares no word with a query is never a hit.

    Raises:
        UserError: a file cannot be read.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        try:
            self.passages = PassageFile(folder)
            self.postings = Postings(folder / FOLDER, manifest.passages)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: cannot be opened ({error}); try sorl-index verify") from error

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """The best passages as (place in the corpus, score), best first."""
        places, scores = self.postings.best(self.postings.get_tokens_ids(query_stems(query)), top_k)
        return list(zip(places.tolist(), scores.tolist(), strict=True))

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """See ``Index``."""
        check_top_k(top_k)
        return [
            [Hit(self.passages[place], score) for place, score in self.rank(query, top_k)]
            for query in queries
        ]

    def close(self) -> None:
        """See ``Index``."""
        self.passages.close()
