"""Build the vectors of a dense index: embed the passages chunk by chunk, then compress the vectors with FAISS."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_tools.corpus import PassageFile
from sorl_tools.index.build.journal import Journal, npy_header
from sorl_tools.index.build.options import DENSE, DenseOptions
from sorl_tools.index.encoder import Encoder
from sorl_tools.index.faiss_kinds import SEARCH_SETTINGS, factory_string, faiss_module, write_faiss
from sorl_tools.progress import Progress

VECTORS, FAISS = "vectors.npy", "index.faiss"
CHUNK = 1024  # passages between two records of the journal


def dense_request(options: DenseOptions) -> dict[str, Any]:
    """The options that must be the same when an unfinished build is continued.

    Raises:
        UserError: an option cannot be met; checked before the corpus is read.
    """
    faiss_module()
    if options.batch_size < 1:
        raise UserError(f"--batch_size {options.batch_size}: give at least 1")
    if not options.model:
        raise UserError("a dense index needs --model: a model folder, or a name such as intfloat/e5-base-v2")
    factory_string(options.faiss, 2, 1)
    if options.vectors is not None and not options.vectors.is_file():
        raise UserError(f"--vectors {options.vectors}: no such file")
    Encoder(options.model, device=options.device)  # fails now, and not after an hour of reading the corpus
    return {
        "model": options.model,
        "query_prefix": options.query_prefix,
        "passage_prefix": options.passage_prefix,
        "faiss": options.faiss,
        "keep_vectors": options.keep_vectors,
        "batch_size": options.batch_size,
        "vectors": None if options.vectors is None else str(options.vectors.resolve()),
    }


def write_vectors(
    out: Path, passages: PassageFile, journal: Journal, progress: Progress, options: DenseOptions
) -> dict[str, Any]:
    """Write ``out/dense``; returns the parameters for the manifest.

    Raises:
        UserError: the model cannot be loaded, or the vectors do not match the passages.
    """
    encoder = Encoder(
        options.model,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
        device=options.device,
    )
    factory = factory_string(options.faiss, encoder.dim, len(passages))
    folder = out / DENSE
    folder.mkdir(exist_ok=True)
    flat = folder / VECTORS
    if journal.last("vectors") is None:
        if options.vectors is not None:
            shutil.copyfile(_checked(options.vectors, len(passages), encoder.dim), flat)
        else:
            _embed(flat, passages, journal, progress, encoder, options.batch_size)
        journal.add({"stage": "vectors"}, now=True)
    if factory:
        if journal.last("compressed") is None:
            write_faiss(np.load(flat, mmap_mode="r"), factory, folder / FAISS, progress)
            journal.add({"stage": "compressed"}, now=True)
        if not options.keep_vectors:
            flat.unlink(missing_ok=True)
    model = str(Path(options.model).expanduser().resolve()) if Path(options.model).is_dir() else options.model
    return {
        "model": model,
        "model_hash": encoder.hash(),
        "dim": encoder.dim,
        "query_prefix": encoder.prefixes.query,
        "passage_prefix": encoder.prefixes.passage,
        "faiss": options.faiss,
        "factory": factory,
        "settings": _settings(factory),
    }


def _embed(
    path: Path,
    passages: PassageFile,
    journal: Journal,
    progress: Progress,
    encoder: Encoder,
    batch_size: int,
) -> None:
    header = npy_header((len(passages), encoder.dim), np.float32)
    done = int((journal.last("embedded") or {"passages": 0})["passages"])
    file = journal.append_to(path, len(header) + done * encoder.dim * 4 if done else 0)
    if not done:
        file.write(header)
    progress.start("vectors", len(passages), done)
    while done < len(passages):
        chunk = passages[done : done + CHUNK]
        file.write(encoder.passages(chunk, batch_size))
        done += len(chunk)
        journal.add({"stage": "embedded", "passages": done})
        progress.advance(len(chunk))
    file.close()


def _checked(path: Path, passages: int, dim: int) -> Path:
    try:
        vectors: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"--vectors {path}: not a .npy file ({error})") from error
    if vectors.shape != (passages, dim) or vectors.dtype != np.float32:
        raise UserError(
            f"--vectors {path}: it holds {vectors.dtype} {vectors.shape}, but {passages:,} passages and this model "
            f"need float32 ({passages}, {dim})"
        )
    if not np.isfortran(vectors):
        return path
    raise UserError(f"--vectors {path}: it is in Fortran order; save np.ascontiguousarray(vectors)")


def _settings(factory: str) -> dict[str, int]:
    wanted = {"nprobe": "IVF" in factory, "efSearch": "HNSW" in factory}
    return {name: SEARCH_SETTINGS[name] for name, fits in wanted.items() if fits}
