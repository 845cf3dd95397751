"""Kinds of FAISS index by name: how they are made from vectors in a file, and searched in a memory-mapped file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError, did_you_mean
from sorl_tools.progress import Progress

Floats = npt.NDArray[np.float32]

KINDS = ("flat", "fp16", "sq8", "sq4", "pq", "ivfpq", "hnsw")
ADD_BLOCK = 16_384
TRAIN_VECTORS = 262_144
SEED = 0
SEARCH_SETTINGS = {"nprobe": ("IVF", 64), "efSearch": ("HNSW", 128)}  # for factories that hold this word


def faiss_module() -> Any:
    """The module ``faiss``.

    Raises:
        UserError: it is not installed, or is too old to memory-map its files.
    """
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise UserError("dense search needs FAISS: pip install 'sorl[search]'") from error
    if not hasattr(faiss, "IO_FLAG_MMAP_IFC"):
        raise UserError(f"FAISS {faiss.__version__} is too old; install faiss-cpu 1.11 or newer")
    return faiss


def factory_string(kind: str, dim: int, passages: int) -> str:
    """FAISS's factory string for a kind of index; ``""`` for ``flat``. A factory string is returned as it is.

    ``sq4``, ``pq`` and ``ivfpq`` store each element of a vector in four bits, an eighth of float32. ``pq`` gives each
    element 16 levels of its own, which are trained in seconds; pairs of elements in a byte would have 256 centroids,
    whose training takes hours.

    Raises:
        UserError: the kind is not known.
    """
    if re.search(r"[A-Z]", kind):
        return kind
    lists = min(65_536, max(1, 2 ** round(np.log2(4 * np.sqrt(max(passages, 1))))))
    known = {
        "flat": "",
        "fp16": "SQfp16",
        "sq8": "SQ8",
        "sq4": "SQ4",
        "pq": f"PQ{dim}x4fs",
        "ivfpq": f"IVF{lists},PQ{dim}x4fs",
        "hnsw": "HNSW32,Flat",
    }
    if kind not in known:
        raise UserError(f"--faiss {kind!r} is unknown, and no factory string. {did_you_mean(kind, KINDS)}")
    return known[kind]


def write_faiss(vectors: Floats, factory: str, path: Path, progress: Progress) -> None:
    """Train an index on a sample of ``vectors``, (passages, dim), add all of them, and write it.

    A single thread adds them, so that the same vectors give the same file.

    Raises:
        UserError: FAISS does not know the factory string, or there are too few passages to train it.
    """
    faiss = faiss_module()
    passages, dim = vectors.shape
    threads = faiss.omp_get_max_threads()
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            chosen = np.random.default_rng(SEED).choice(passages, min(passages, TRAIN_VECTORS), replace=False)
            progress.start("training", len(chosen))
            index.train(np.ascontiguousarray(vectors[np.sort(chosen)]))
            progress.advance(len(chosen))
        faiss.omp_set_num_threads(1)
        progress.start("adding", passages)
        for start in range(0, passages, ADD_BLOCK):
            block = np.ascontiguousarray(vectors[start : start + ADD_BLOCK])
            index.add(block)
            progress.advance(len(block))
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        what = f"{passages:,} vectors of {dim} elements"
        raise UserError(f"--faiss {factory}: FAISS cannot index {what} ({_reason(error)})") from error
    finally:
        faiss.omp_set_num_threads(threads)


def _reason(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1]


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
        sizes.
        """
        wide = min(len(self._vectors), top_k + EXTRA)
        metric = self._faiss.METRIC_INNER_PRODUCT
        _, found = self._faiss.knn(queries, self._vectors, wide, metric=metric)
        for query, row in zip(queries, found, strict=True):
            places = row[row >= 0]  # vectors with NaN are never found
            scores = (self._vectors[places].astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
            yield _ordered(places, scores, top_k)


class FaissVectors:
    """A memory-mapped index file of FAISS. It is searched on a GPU if FAISS supports that for this kind of index."""

    def __init__(self, path: Path, settings: dict[str, int]) -> None:
        self._faiss = faiss_module()
        try:
            self._index = self._faiss.read_index(str(path), self._faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise UserError(f"{path}: FAISS cannot read it ({_reason(error)})") from error
        self.shape = (self._index.ntotal, self._index.d)
        if self._faiss.get_num_gpus() > 0 and "efSearch" not in settings:
            self._index = self._faiss.index_cpu_to_all_gpus(self._index)
        space = self._faiss.ParameterSpace()
        for name, value in settings.items():
            space.set_index_parameter(self._index, name, value)

    def search(self, queries: Floats, top_k: int) -> Iterator[tuple[npt.NDArray[np.int64], Floats]]:
        """As ``FlatVectors.search``, with the scores of the compressed vectors."""
        scores, found = self._index.search(queries, min(self._index.ntotal, top_k + EXTRA))
        for places, values in zip(found, scores, strict=True):
            held = places >= 0  # there are fewer in the lists that were searched
            yield _ordered(places[held], values[held], top_k)


# So many more hits than wanted are fetched, so that equal scores at the end are cut in the order of the corpus.
EXTRA = 8


def _ordered(
    places: npt.NDArray[np.int64], scores: Floats, top_k: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    order = np.lexsort((places, -scores))[:top_k]
    return places[order], scores[order]
