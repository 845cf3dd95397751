"""Build the vectors of a dense index: embed the passages chunk by chunk, then compress the vectors with FAISS."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage, PassageFile
from sorl_tools.index.build.options import DenseOptions
from sorl_tools.index.dense import FAISS, VECTORS, open_encoder
from sorl_tools.index.encoder import Encoder
from sorl_tools.index.vectors import SEARCH_SETTINGS, factory_string, faiss_module, write_faiss
from sorl_tools.progress import Progress

CHUNK = 1024  # passages embedded between two writes to the disk


def check_options(options: DenseOptions) -> Encoder:
    """The encoder, if all options can be met; checked before the corpus is read.

    Raises:
        UserError: an option cannot be met.
    """
    faiss_module()
    if options.batch_size < 1:
        raise UserError(f"--batch_size {options.batch_size}: give at least 1")
    factory_string(options.faiss, 2, 1)
    if options.vectors is not None and not options.vectors.is_file():
        raise UserError(f"--vectors {options.vectors}: no such file")
    return open_encoder(
        options.model, options.encoder, options.query_prefix, options.passage_prefix, options.device
    )


def write_vectors(
    folder: Path,
    begun: Path,
    passages: PassageFile,
    progress: Progress,
    options: DenseOptions,
    encoder: Encoder,
) -> dict[str, Any]:
    """Write the vectors into ``folder``; returns the parameters for the manifest.

    Args:
        begun: file of the vectors that an interrupted build has embedded, and to which this one adds.

    Raises:
        UserError: the encoder does not answer, or the vectors do not match the passages.
    """
    folder.mkdir()
    factory = factory_string(options.faiss, encoder.dim, len(passages))
    if options.vectors is not None:
        vectors = _checked(options.vectors, len(passages), encoder.dim)
    else:
        vectors = _embed(begun, passages, progress, encoder, options.batch_size)
    if factory:
        write_faiss(vectors, factory, folder / FAISS, progress)
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
) -> npt.NDArray[np.float32]:
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


def _checked(path: Path, passages: int, dim: int) -> npt.NDArray[np.float32]:
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
        return vectors
    raise UserError(f"--vectors {path}: it is in Fortran order; save np.ascontiguousarray(vectors)")
