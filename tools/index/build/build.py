"""Build an index: the passages, then the part of each backend, then the manifest.

A folder with a request and no manifest is an unfinished build. If a build is killed, the same command reads the corpus
again but keeps the vectors that were embedded, which took nearly all of the time. BM25 indexes of corpus files are
built once for each content, and are memory-mapped from the cache folder.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import platform
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.errors import UserError, installed
from sorl_env.folders import cache_folder, missing_folders, remove_empty
from sorl_tools.corpus import Corpus, PassageFile, check_corpus
from sorl_tools.index.build.bm25 import CHUNK, PostingsBuilder
from sorl_tools.index.build.dense import DenseOptions, check_options, write_vectors
from sorl_tools.index.encoder import Encoder
from sorl_tools.index.index import (
    BM25,
    DENSE,
    FORMAT,
    NAME,
    REQUEST,
    Index,
    Manifest,
    hash_file,
    open_index,
    read_manifest,
    write_manifest,
)
from sorl_tools.progress import Progress

BACKENDS = ("bm25", "dense", "hybrid")
EMBEDDED = "embedded.f32"  # the vectors so far; embedded.json tells by which model
PARTS = ("passages.jsonl", "offsets.npy", BM25, DENSE)
_PACKAGES = "sorl bm25s PyStemmer numpy faiss-cpu faiss-gpu sentence-transformers torch".split()


def build(
    sources: Sequence[Path],
    out: Path,
    backend: str = "bm25",
    *,
    k1: float = 1.5,
    b: float = 0.75,
    dense: DenseOptions = DenseOptions(),
    rrf_k: int = 1,
    depth: int = 100,
    restart: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Build an index in the folder ``out``, or finish a build that was interrupted there. ``sources`` are files and
    folders that hold the passages (see ``Corpus``); ``backend`` is ``bm25``, ``dense`` or ``hybrid``; ``k1`` and ``b``
    are of BM25 (the recall figures of docs/search.md were measured with the defaults); ``dense`` says how passages
    become vectors; ``restart`` deletes the index in ``out`` first, finished or not. In a hybrid, a passage scores ``1 /
    (rrf_k + rank)`` in each part where its rank is at most ``depth``. The usual 60 for ``rrf_k`` is for long result
    lists. An agent reads three passages; with 1, the first of each part is among them. Raises ``UserError`` if the
    corpus cannot be read, an option does not fit, or ``out`` holds something else."""
    corpus = Corpus(sources)
    options: dict[str, dict[str, Any]] = {}
    encoder = None
    if backend != "dense":
        options[BM25] = {"k1": k1, "b": b}
    if backend != "bm25":
        encoder = check_options(dense)
        options[DENSE] = {name: str(value) for name, value in dataclasses.asdict(dense).items()}
    if backend == "hybrid":
        options["hybrid"] = {"rrf_k": rrf_k, "depth": depth}
    # what embedded vectors depend on; other options may change until the build is finished
    prefix = None if encoder is None else encoder.prefixes.passage
    request = json.dumps({"corpus": corpus.fingerprint(), "passage_prefix": prefix})
    with _building(out.expanduser(), request, restart) as folder:
        return _build(corpus, folder, backend, options, dense, encoder, progress or Progress(quiet=True))


@contextmanager
def _building(out: Path, request: str, restart: bool) -> Iterator[Path]:
    """The folder of a build, which no other process uses; what an earlier build embedded is still in it."""
    _check_out(out, restart)
    made = missing_folders(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / REQUEST).open("a+", errors="replace") as file:
            try:
                # the system releases it when this process ends
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{out}: another process is building there; wait for it") from error
            file.seek(0)
            begun = file.read()  # nothing if a build was killed before it wrote its request
            if begun not in ("", request) and not restart:
                raise UserError(
                    f"{out}: it holds an unfinished build of another corpus, of another kind or with another prefix of "
                    "passages; finish that build with its own command, or add --restart to begin again"
                )
            if restart or not begun:
                _remove(out, (EMBEDDED, NAME))
                file.truncate(0)
                file.write(request)
                file.flush()
            _remove(out, PARTS)
            try:
                yield out
            except UserError:
                # the user has to change the request, so there is no build to finish; but what was embedded before the
                # encoder went out is kept
                if begun != request and not (out / EMBEDDED).is_file():
                    _remove(out, (*PARTS, REQUEST))
                    remove_empty(made)
                raise
    except OSError as error:  # of writing: errors of reading the corpus are UserErrors
        raise UserError(
            f"--out {out}: cannot be written ({error}); when it can, give the same command again"
        ) from error


def _check_out(out: Path, restart: bool) -> None:
    if not out.exists() or (out / REQUEST).is_file():
        return
    if not out.is_dir():
        raise UserError(f"--out {out}: it is a file; give a folder")
    if not (out / NAME).is_file():
        if any(out.iterdir()):
            raise UserError(f"--out {out}: the folder holds other files; give a new or an empty one")
    elif not restart:
        try:
            manifest = read_manifest(out)
        except UserError as error:
            raise UserError(
                f"--out {out}: its index cannot be used ({error}); replace it with --restart"
            ) from error
        raise UserError(
            f"--out {out}: it holds a finished {manifest.backend} index of {manifest.passages:,} passages; give "
            "another folder, or replace the index with --restart"
        )


def _remove(folder: Path, names: Sequence[str]) -> None:
    for path in (folder / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _build(
    corpus: Corpus,
    folder: Path,
    backend: str,
    options: dict[str, dict[str, Any]],
    dense: DenseOptions,
    encoder: Encoder | None,
    progress: Progress,
) -> Manifest:
    began = time.monotonic()
    postings = PostingsBuilder() if BM25 in options else None
    passages = _copy_passages(corpus, folder, postings, progress)
    if postings is not None:
        progress.start("lists", 0)
        options[BM25] = postings.write(folder / BM25, **options[BM25])
    if encoder is not None:
        options[DENSE] = write_vectors(folder / DENSE, folder / EMBEDDED, passages, progress, dense, encoder)
    parts = [folder / name for name in PARTS]
    paths = [path for part in parts for path in (part, *sorted(part.rglob("*"))) if path.is_file()]
    progress.start("hashing", sum(path.stat().st_size for path in paths))
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hash_file(path, progress.advance),
        }
        for path in paths
    }
    manifest = Manifest(
        backend=backend,
        passages=len(passages),
        corpus={
            "source": [str(source.resolve()) for source in corpus.sources],
            "hash": f"sha256:{files['passages.jsonl']['sha256']}",
        },
        parameters=options,
        files=files,
        versions=_versions(),
        built_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        build_seconds=round(time.monotonic() - began, 3),
    )
    passages.close()
    write_manifest(manifest, folder)
    _remove(folder, (EMBEDDED, "embedded.json", REQUEST))
    return manifest


def _copy_passages(
    corpus: Corpus, folder: Path, postings: PostingsBuilder | None, progress: Progress
) -> PassageFile:
    ends = array("q", [0])  # where each line ends
    rows = corpus.passages()
    progress.start("passages", 0)
    with (folder / "passages.jsonl").open("wb") as text:
        while chunk := list(islice(rows, CHUNK)):
            for passage in chunk:
                ends.append(ends[-1] + text.write(PassageFile.line(passage)))
            if postings is not None:
                postings.add([f"{passage.title}\n{passage.text}" for passage in chunk])
            progress.advance(len(chunk))
    if len(ends) == 1:
        raise UserError(f"{', '.join(map(str, corpus.sources))}: the corpus has no passages")
    np.save(folder / "offsets.npy", np.frombuffer(ends, dtype=np.int64))
    return PassageFile(folder)


def _versions() -> dict[str, str]:
    found = {name: version for name in _PACKAGES if (version := installed(name))}
    return {"python": platform.python_version(), **found}


_open = lru_cache(maxsize=4)(open_index)


def open_bm25(path: Path) -> tuple[Index, str]:
    """The BM25 index of a corpus, and the hash of what is searched. The index of a new corpus file is built first.
    ``path`` is a ``.jsonl`` or ``.jsonl.gz`` file, or a folder that ``sorl-index`` built. Raises UserError if it cannot
    be read, or the cache folder cannot be written."""
    if path.is_dir():
        manifest = read_manifest(path)
        if manifest.backend != "bm25":
            raise UserError(
                f"{path}: a {manifest.backend} index embeds its queries: serve it with sorl-serve, and give the task "
                "the server's address as search_url"
            )
        return _open(path), manifest.hash
    check_corpus(path)
    digest = hash_file(path)
    # named by the format as well, because another version may store indexes differently
    folder = cache_folder() / "bm25" / f"{digest[:24]}-index{FORMAT}"
    if not folder.is_dir():
        _build_cached(path, folder)
    return _open(folder), f"sha256:{digest}"


def _build_cached(path: Path, folder: Path) -> None:
    """Build the index of a corpus, which appears complete or not at all; of several builders the first one wins."""
    made = missing_folders(folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot keep an index there ({error}); set SORL_CACHE") from error
    try:
        build([path], building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
        remove_empty(made)  # left over if the corpus cannot be indexed
