"""What an index is to those who search it, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index.manifest import Manifest


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


def check_top_k(top_k: int) -> None:
    """Raise UserError unless ``top_k`` is at least 1."""
    if top_k < 1:
        raise UserError(f"top_k={top_k}: ask for 1 passage or more")
