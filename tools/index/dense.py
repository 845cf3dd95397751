"""The vectors of an index that has been opened, and the encoder of its queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_tools.index.encoder import Encoder, LocalEncoder, named_prefixes, with_defaults
from sorl_tools.index.vectors import FaissVectors, FlatVectors

VECTORS, FAISS = "vectors.npy", "index.faiss"


class DensePart:
    """Vectors that are searched by FAISS.

    Args:
        facts: the part's parameters in the manifest.
        model: folder or name of the embedding model, or address of its server, if not what the manifest says.
        device: torch device of the model.

    Raises:
        UserError: a file cannot be read, or the model is missing or is not the one that the index was built with.
        ValueError: the vectors are not those of so many passages.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], passages: int, model: str | None, device: str | None
    ) -> None:
        self._vectors = (
            FaissVectors(folder / FAISS, dict(facts["settings"]))
            if facts["factory"]
            else FlatVectors(folder / VECTORS)
        )
        if self._vectors.shape != (passages, facts["dim"]):
            raise ValueError(f"vectors of the shape {self._vectors.shape}, not {(passages, facts['dim'])}")
        remote = facts["encoder"] is not None
        self._encoder = open_encoder(
            facts["model"] if remote else model or facts["model"],
            (model or facts["encoder"]) if remote else None,
            facts["query_prefix"],
            facts["passage_prefix"],
            device,
        )
        if not self._encoder.matches(facts["identity"]):
            raise UserError(
                f"{self._encoder.name}: it embeds otherwise than the model that {folder.parent} was built with "
                f"({facts['model']}): name that model, or build the index again"
            )

    def top(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """For each query the best passages as (place in the corpus, score), best first."""
        found = self._vectors.search(self._encoder.queries(queries), top_k)
        return [list(zip(places.tolist(), scores.tolist(), strict=True)) for places, scores in found]


def open_encoder(
    model: str,
    address: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    device: str | None = None,
) -> Encoder:
    """The encoder of a model: at ``address`` if there is one, or else in this process.

    Args:
        model: a model folder or a name.
        address: of a server with OpenAI's embeddings API, such as ``http://127.0.0.1:8080/v1``.
        query_prefix: text before a query; None takes it from the model's configuration or name.
        passage_prefix: text before a passage, likewise.
        device: torch device, for a model in this process; None takes a GPU if there is one.

    Raises:
        UserError: no model is named, there is no such model, or the server does not answer.
    """
    if not model:
        raise UserError("a dense index needs --model: a model folder, or a name such as intfloat/e5-base-v2")
    if address is None:
        return LocalEncoder(model, query_prefix, passage_prefix, device)
    from sorl_tools.index.remote_encoder import RemoteEncoder

    if device is not None:
        raise UserError(f"device={device}: the encoder at {address} chooses its own; leave it out")
    return RemoteEncoder(address, model, with_defaults(named_prefixes([model]), query_prefix, passage_prefix))
