"""The vectors of an index that has been opened: searched by FAISS, exactly or compressed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError, install_command
from sorl_tools.index.encoder import Floats, open_encoder

VECTORS, FAISS = "vectors.npy", "index.faiss"
# So many more hits than wanted are fetched, so that equal scores at the end are cut in the order of the corpus.
EXTRA = 8


def faiss_module() -> Any:
    """The module ``faiss``. Raises ``UserError`` if it is not installed, or is too old to memory-map its files."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise UserError(f"dense search needs FAISS: {install_command('search')}") from error
    if not hasattr(faiss, "IO_FLAG_MMAP_IFC"):
        raise UserError(f"FAISS {faiss.__version__} is too old; install faiss-cpu 1.11 or newer")
    return faiss


class DensePart:
    """The vectors of an index, and the encoder of its queries. ``facts`` are the part's parameters in the manifest;
    ``model`` is the folder or name of the embedding model, or the address of its server, if not what the manifest says.
    Raises ``UserError`` if a file cannot be read, or the model is missing or is not the one that the index was built
    with, and ``ValueError`` if the vectors are those of another number of passages."""

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], passages: int, model: str | None, device: str | None
    ) -> None:
        self._vectors = (
            FaissVectors(folder / FAISS, facts["settings"])
            if facts["factory"]
            else FlatVectors(folder / VECTORS)
        )
        if self._vectors.shape != (passages, facts["dim"]):
            raise ValueError(f"vectors of the shape {self._vectors.shape}, not {(passages, facts['dim'])}")
        prefixes = facts["query_prefix"], facts["passage_prefix"]
        if facts["encoder"] is None:
            self._encoder = open_encoder(model or facts["model"], None, *prefixes, device)
        else:
            self._encoder = open_encoder(facts["model"], model or facts["encoder"], *prefixes, device)
        if not self._encoder.matches(facts["identity"]):
            raise UserError(
                f"{self._encoder.name}: it embeds otherwise than the model that {folder.parent} was built with "
                f"({facts['model']}): name that model, or build the index again"
            )

    def top(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
        """For each query the best passages as (place in the corpus, score), best first."""
        found = self._vectors.search(self._encoder.queries(queries), top_k)
        return [list(zip(places.tolist(), scores.tolist(), strict=True)) for places, scores in found]


class FlatVectors:
    """Exact search in a memory-mapped .npy file, whose memory processes share."""

    def __init__(self, path: Path) -> None:
        self._faiss = faiss_module()
        self._vectors: Floats = np.asarray(np.load(path, mmap_mode="r"))
        self.shape = self._vectors.shape
        if self._vectors.dtype != np.float32:
            raise ValueError(f"vectors of {self._vectors.dtype}")

    def search(self, queries: Floats, top_k: int) -> Iterator[tuple[npt.NDArray[np.int64], Floats]]:
        """For each of ``queries``, (n, dim), the places and scores of the best vectors; equal scores in corpus order.
        The best are scored again one query at a time, because a matrix product rounds differently for other batch
        sizes."""
        wide = min(len(self._vectors), top_k + EXTRA)
        metric = self._faiss.METRIC_INNER_PRODUCT
        _, found = self._faiss.knn(queries, self._vectors, wide, metric=metric)
        for query, row in zip(queries, found, strict=True):
            places = row[row >= 0]  # vectors with NaN are never found
            scores = (self._vectors[places].astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
            yield _ordered(places, scores, top_k)


class FaissVectors:
    """A memory-mapped index file of FAISS. FAISS's build for GPUs copies it to all of them, if it can this kind of
    index. ``settings`` are FAISS's search parameters, such as ``{"nprobe": 64}``."""

    def __init__(self, path: Path, settings: Mapping[str, int]) -> None:
        faiss = faiss_module()
        try:
            self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise UserError(f"{path}: FAISS cannot read it ({faiss_reason(error)})") from error
        self.shape = (self._index.ntotal, self._index.d)
        # before the copy, which takes them along and knows no such names
        for name, value in settings.items():
            faiss.ParameterSpace().set_index_parameter(self._index, name, value)
        if faiss.get_num_gpus() > 0:
            with suppress(RuntimeError):  # most compressed kinds are for processors only
                self._index = faiss.index_cpu_to_all_gpus(self._index)

    def search(self, queries: Floats, top_k: int) -> Iterator[tuple[npt.NDArray[np.int64], Floats]]:
        """As ``FlatVectors.search``, with the scores of the compressed vectors."""
        scores, found = self._index.search(queries, min(self._index.ntotal, top_k + EXTRA))
        for places, values in zip(found, scores, strict=True):
            held = places >= 0  # there are fewer in the lists that were searched
            yield _ordered(places[held], values[held], top_k)


def faiss_reason(error: RuntimeError) -> str:
    """What FAISS says of an error, without where in its source that was."""
    return str(error).strip().splitlines()[-1]


def _ordered(
    places: npt.NDArray[np.int64], scores: Floats, top_k: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    order = np.lexsort((places, -scores))[:top_k]
    return places[order], scores[order]
