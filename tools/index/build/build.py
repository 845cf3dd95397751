"""Build an index: the passages, then the part of each backend, then the manifest.

Everything is written into a folder within the index's own, and moved out of it at the end. If a build is killed, the
same command reads the corpus again but keeps the vectors that were embedded, which took nearly all of the time.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sorl_env.errors import UserError, did_you_mean
from sorl_env.folders import missing_folders, remove_empty
from sorl_tools.corpus import PassageFile
from sorl_tools.index.build.bm25 import CHUNK, PostingsBuilder
from sorl_tools.index.build.corpora import Corpus
from sorl_tools.index.build.options import Bm25Options, DenseOptions, HybridOptions
from sorl_tools.index.index import BM25, DENSE
from sorl_tools.index.manifest import BUILDING, NAME, Manifest, hash_file, read_manifest, write_manifest
from sorl_tools.progress import Progress

if TYPE_CHECKING:
    from sorl_tools.index.encoder import Encoder

BACKENDS = ("bm25", "dense", "hybrid")
REQUEST, EMBEDDED = "request.json", "embedded.f32"  # what was asked for, and the vectors so far
LOCK, SCRATCH = "lock", "request.tmp"
PARTS = ("passages.jsonl", "offsets.npy", BM25, DENSE)
_PACKAGES = "sorl bm25s PyStemmer numpy faiss-cpu faiss-gpu sentence-transformers torch".split()


def build(
    sources: Sequence[Path],
    out: Path,
    backend: str = "bm25",
    *,
    bm25: Bm25Options = Bm25Options(),
    dense: DenseOptions = DenseOptions(),
    hybrid: HybridOptions = HybridOptions(),
    restart: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Build an index in the folder ``out``, or finish a build that was interrupted there.

    Args:
        sources: files and folders that hold the passages, see ``Corpus``.
        restart: delete the index in ``out`` first, finished or not.

    Raises:
        UserError: the corpus cannot be read, an option does not fit, or ``out`` holds something else.
    """
    if backend not in BACKENDS:
        raise UserError(f"--backend {backend!r} is unknown. {did_you_mean(backend, BACKENDS)}")
    corpus = Corpus(sources)
    out = out.expanduser()
    options: dict[str, dict[str, Any]] = {}
    encoder = None
    if backend != "dense":
        if not 0 <= bm25.k1 < float("inf") or not 0 <= bm25.b <= 1:
            raise UserError(f"--k1 {bm25.k1} --b {bm25.b}: k1 must be 0 or more, and b from 0 to 1")
        options[BM25] = dataclasses.asdict(bm25)
    if backend != "bm25":
        from sorl_tools.index.build.dense import check_options

        encoder = check_options(dense)
        options[DENSE] = {name: str(value) for name, value in dataclasses.asdict(dense).items()}
    if backend == "hybrid":
        if hybrid.rrf_k < 0 or hybrid.depth < 1:
            raise UserError(f"--rrf_k {hybrid.rrf_k} --depth {hybrid.depth}: give 0 or more, and 1 or more")
        options["hybrid"] = dataclasses.asdict(hybrid)
    _check_out(out, restart)
    request = {"backend": backend, "corpus": corpus.fingerprint(), **options}
    with _building(out, json.dumps(request)) as folder:
        return _build(corpus, folder, backend, options, dense, encoder, progress or Progress(quiet=True))


def _check_out(out: Path, restart: bool) -> None:
    """Make sure that ``out`` may be written to, and empty it on ``restart``."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out}: it is a file; give a folder")
    if not any(out.iterdir()):
        return
    if not (out / NAME).is_file() and not _is_begun(out):
        raise UserError(f"--out {out}: the folder holds other files; give a new or an empty one")
    if restart:
        _remove(out, (NAME, BUILDING, *PARTS))
    elif (out / NAME).is_file():
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


def _is_begun(out: Path) -> bool:
    """Whether a build has begun in ``out``, even if it was killed before it wrote its request."""
    folder = out / BUILDING
    if (folder / REQUEST).is_file():
        return True
    return [*out.iterdir()] == [folder] and {path.name for path in folder.glob("*")} <= {LOCK, SCRATCH}


def _remove(folder: Path, names: Sequence[str]) -> None:
    for path in (folder / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _building(out: Path, request: str) -> Iterator[Path]:
    """The folder of a build under way, which no other process uses; what an earlier build embedded is still in it."""
    made = missing_folders(out)
    folder = out / BUILDING
    is_new = not (folder / REQUEST).is_file()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_new and (folder / REQUEST).read_text(errors="replace") != request:
            raise UserError(
                f"{out}: it holds an unfinished build of another corpus or with other options; finish that build "
                "with its own command, or add --restart to begin again"
            )
        with _locked(folder):
            (folder / SCRATCH).write_text(request)
            (folder / SCRATCH).replace(folder / REQUEST)  # it is there completely or not at all
            _remove(folder, PARTS)
            try:
                yield folder
            except UserError:
                # the user has to change the request, so there is no build to finish; but what was embedded before the
                # encoder went out is kept
                if is_new and not (folder / EMBEDDED).is_file():
                    shutil.rmtree(folder, ignore_errors=True)
                    remove_empty(made)
                raise
    except OSError as error:  # of writing: errors of reading the corpus are UserErrors
        raise UserError(
            f"--out {out}: cannot be written ({error}); when it can, give the same command again"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from building in the folder; the system releases the lock when this one ends."""
    with (folder / LOCK).open("ab") as file:
        try:
            import fcntl
        except ModuleNotFoundError:  # on Windows an open file cannot be deleted anyway
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder.parent}: another process is building there; wait for it") from error
        yield


def _build(
    corpus: Corpus,
    folder: Path,
    backend: str,
    options: dict[str, dict[str, Any]],
    dense: DenseOptions,
    encoder: Encoder | None,
    progress: Progress,
) -> Manifest:
    """Write all parts into ``folder``, then move them to the folder above it, the manifest last."""
    began = time.monotonic()
    postings = PostingsBuilder() if BM25 in options else None
    passages = _copy_passages(corpus, folder, postings, progress)
    if postings is not None:
        progress.start("lists", 0)
        bm25 = Bm25Options(**options[BM25])
        facts = {"method": "lucene", "stemmer": "english", **postings.write(folder / BM25, bm25)}
        options[BM25] = {**options[BM25], **facts}
    if encoder is not None:
        from sorl_tools.index.build.dense import write_vectors

        begun = folder / EMBEDDED
        options[DENSE] = write_vectors(folder / DENSE, begun, passages, progress, dense, encoder)
    paths = [
        path
        for name in PARTS
        for path in sorted((folder / name).rglob("*")) or [folder / name]
        if path.is_file()
    ]
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
    _remove(folder.parent, PARTS)  # moved by a build that was killed while it moved them
    for name in PARTS:
        if (folder / name).exists():
            (folder / name).rename(folder.parent / name)
    write_manifest(manifest, folder.parent)
    shutil.rmtree(folder)
    return manifest


def _copy_passages(
    corpus: Corpus, folder: Path, postings: PostingsBuilder | None, progress: Progress
) -> PassageFile:
    """Copy the passages; for BM25, count their words at the same time."""
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
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not installed, so it was not used
    return found
