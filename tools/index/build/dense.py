"""Build the vectors of a dense index: embed the passages chunk by chunk, then compress the vectors with FAISS."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError, did_you_mean
from sorl_tools.corpus import Passage, PassageFile
from sorl_tools.index.encoder import Encoder, Floats, open_encoder
from sorl_tools.index.vectors import FAISS, VECTORS, faiss_module, faiss_reason
from sorl_tools.progress import Progress

CHUNK = 1024  # passages embedded between two writes to the disk
ADD_BLOCK = 16_384
TRAIN_VECTORS = 262_144
SEED = 0
SEARCH_SETTINGS = {"nprobe": ("IVF", 64), "efSearch": ("HNSW", 128)}  # for factories that hold this word


@dataclass(frozen=True)
class DenseOptions:
    """How passages become vectors, and how these are searched."""

    model: str = ""  # a model folder of sentence-transformers, or a name that it or the ``encoder`` finds
    encoder: str | None = None  # address of a server with OpenAI's embeddings API, which then embeds
    query_prefix: str | None = None  # None takes it from the model's configuration or name (E5's are known)
    passage_prefix: str | None = None  # likewise
    vectors: Path | None = (
        None  # .npy of the passages' vectors, (passages, dim) float32, made with this model
    )
    faiss: str = "flat"  # a kind that ``factory_string`` knows, or a factory string of FAISS
    batch_size: int = 64  # passages embedded at a time
    device: str | None = None  # torch device of the model; None takes a GPU if there is one


def check_options(options: DenseOptions) -> Encoder:
    """The encoder, if all options can be met; checked before the corpus is read. Raises ``UserError`` if an option
    cannot be met."""
    faiss = faiss_module()
    factory_string(options.faiss, 2, 1)
    if options.vectors is not None and not options.vectors.is_file():
        raise UserError(f"--vectors {options.vectors}: no such file")
    encoder = open_encoder(
        options.model, options.encoder, options.query_prefix, options.passage_prefix, options.device
    )
    if factory := factory_string(options.faiss, encoder.dim, 1):
        try:
            faiss.index_factory(encoder.dim, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise UserError(
                f"--faiss {factory}: FAISS knows no such index of {encoder.dim} elements ({faiss_reason(error)}); "
                "give another kind"
            ) from error
    return encoder


def factory_string(kind: str, dim: int, passages: int) -> str:
    """FAISS's factory string for a kind of index; ``""`` for ``flat``. A factory string is returned as it is. ``sq4``,
    ``pq`` and ``ivfpq`` store each element of a vector in four bits, an eighth of float32. ``pq`` gives each element 16
    levels of its own, which are trained in seconds; pairs of elements in a byte would have 256 centroids, whose
    training takes hours. Raises ``UserError`` if the kind is not known."""
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
        raise UserError(f"--faiss {kind!r} is unknown, and no factory string. {did_you_mean(kind, known)}")
    return known[kind]


def write_vectors(
    folder: Path,
    begun: Path,
    passages: PassageFile,
    progress: Progress,
    options: DenseOptions,
    encoder: Encoder,
) -> dict[str, Any]:
    """Write the vectors into ``folder``; returns the parameters for the manifest. To the file ``begun``, which has the
    vectors that an interrupted build has embedded, this one adds its own. Raises ``UserError`` if the encoder does not
    answer, or the vectors do not match the passages."""
    folder.mkdir()
    factory = factory_string(options.faiss, encoder.dim, len(passages))
    if options.vectors is not None:
        vectors = _checked(options.vectors, len(passages), encoder.dim)
    else:
        vectors = _embed(begun, passages, progress, encoder, options.batch_size)
    if factory:
        _write_faiss(vectors, factory, folder / FAISS, progress)
    elif options.vectors is not None:
        shutil.copyfile(options.vectors, folder / VECTORS)
    else:
        np.save(folder / VECTORS, vectors)
    is_folder = options.encoder is None and Path(options.model).expanduser().is_dir()
    return {
        "model": str(Path(options.model).expanduser().resolve()) if is_folder else options.model,
        "encoder": options.encoder,
        "identity": encoder.identity(),
        "dim": encoder.dim,
        "query_prefix": encoder.prefixes.query,
        "passage_prefix": encoder.prefixes.passage,
        "faiss": options.faiss,
        "factory": factory,
        "settings": {name: value for name, (kind, value) in SEARCH_SETTINGS.items() if kind in factory},
    }


def text_of(passage: Passage) -> str:
    """What is embedded of a passage."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def _embed(
    begun: Path, passages: PassageFile, progress: Progress, encoder: Encoder, batch_size: int
) -> Floats:
    row_bytes = encoder.dim * 4
    model = begun.with_suffix(".json")  # tells which model has embedded
    if not begun.is_file():
        model.write_text(json.dumps(encoder.identity()))
    elif not encoder.matches(json.loads(model.read_text())):
        raise UserError(
            f"{encoder.name}: it embeds otherwise than when this build began: name that model, or add --restart"
        )
    with begun.open("ab") as file:
        done = min(file.tell() // row_bytes, len(passages))
        file.truncate(done * row_bytes)  # a killed build may have left half a vector
        progress.start("vectors", len(passages), done)
        while done < len(passages):
            chunk = passages[done : done + CHUNK]
            file.write(encoder.passages([text_of(passage) for passage in chunk], batch_size).tobytes())
            file.flush()
            os.fsync(file.fileno())
            done += len(chunk)
            progress.advance(len(chunk))
    return np.memmap(begun, dtype=np.float32, mode="r", shape=(len(passages), encoder.dim))


def _checked(path: Path, passages: int, dim: int) -> Floats:
    try:
        vectors: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"--vectors {path}: not a .npy file ({error})") from error
    if vectors.shape != (passages, dim) or vectors.dtype != np.float32 or np.isfortran(vectors):
        order = " in Fortran order" if np.isfortran(vectors) else ""
        raise UserError(
            f"--vectors {path}: it holds {vectors.dtype} {vectors.shape}{order}, but {passages:,} passages and this "
            f"model need float32 ({passages}, {dim}) in C order: save np.ascontiguousarray(vectors, np.float32)"
        )
    return vectors


def _write_faiss(vectors: Floats, factory: str, path: Path, progress: Progress) -> None:
    """Train an index on a sample of ``vectors``, (passages, dim), add all of them, and write it. A single thread adds
    them, so that the same vectors give the same file."""
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
        raise UserError(
            f"--faiss {factory}: FAISS cannot index {what} ({faiss_reason(error)}); give another kind"
        ) from error
    finally:
        faiss.omp_set_num_threads(threads)
