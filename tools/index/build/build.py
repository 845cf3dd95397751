"""Build an index: the passages, then the part of each backend, then the manifest. A killed build can continue."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.errors import UserError, did_you_mean
from sorl_env.folders import missing_folders, remove_empty
from sorl_tools.corpus import Passage, PassageFile
from sorl_tools.index.bm25 import FOLDER as BM25
from sorl_tools.index.build.bm25 import CHUNK, K1, B, TokenScratch, write_postings
from sorl_tools.index.build.corpora import Corpus
from sorl_tools.index.build.journal import Journal, npy_header
from sorl_tools.index.manifest import BUILDING, NAME, Manifest, hash_file, read_manifest, write_manifest
from sorl_tools.progress import Progress

BACKENDS = ("bm25", "dense", "hybrid")
DENSE = "dense"
_PACKAGES = "sorl bm25s PyStemmer numpy faiss-cpu faiss-gpu sentence-transformers torch".split()


@dataclass(frozen=True)
class Bm25Options:
    """BM25's parameters. The recall figures of docs/search.md were measured with these defaults."""

    k1: float = K1
    b: float = B


@dataclass(frozen=True)
class DenseOptions:
    """How passages become vectors, and how these are searched.

    Args:
        model: a model folder of sentence-transformers, or a name that it finds.
        query_prefix: text before a query; None takes it from the model's configuration or name (E5's are known).
        passage_prefix: text before a passage, likewise.
        vectors: a .npy file of the passages' vectors, (passages, dim) float32, computed earlier with this model.
        faiss: a kind of ``faiss_kinds.KINDS``, or a factory string of FAISS.
        batch_size: passages embedded at a time.
        device: torch device of the model; None takes a GPU if there is one.
        keep_vectors: keep the float32 vectors in the folder beside a compressed index.
    """

    model: str = ""
    query_prefix: str | None = None
    passage_prefix: str | None = None
    vectors: Path | None = None
    faiss: str = "flat"
    batch_size: int = 64
    device: str | None = None
    keep_vectors: bool = False


@dataclass(frozen=True)
class HybridOptions:
    """Reciprocal rank fusion: a passage scores ``1 / (rrf_k + rank)`` in each part where its rank is at most ``depth``.

    The usual ``rrf_k`` of 60 is for long result lists. An agent reads three passages; with 1, the first of each part is
    among them.
    """

    rrf_k: int = 1
    depth: int = 100


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
    """Build an index in the folder ``out``, or continue a build that was interrupted there.

    Args:
        sources: files and folders that hold the passages, see ``Corpus``.
        restart: delete the index in ``out`` first, finished or not.

    Raises:
        UserError: the corpus cannot be read, an option does not fit, or ``out`` holds something else.
    """
    if backend not in BACKENDS:
        raise UserError(f"--backend {backend!r} is unknown. {did_you_mean(backend, BACKENDS)}")
    corpus = Corpus(sources)
    shown = progress or Progress(quiet=True)
    out = out.expanduser()
    options: dict[str, Any] = {}
    if backend in ("bm25", "hybrid"):
        options["bm25"] = _checked_bm25(bm25)
    if backend in ("dense", "hybrid"):
        from sorl_tools.index.build.dense import dense_request

        options["dense"] = dense_request(dense)
    if backend == "hybrid":
        if hybrid.rrf_k < 0 or hybrid.depth < 1:
            raise UserError(
                f"--rrf_k {hybrid.rrf_k} --depth {hybrid.depth}: rrf_k must be 0 or more, depth 1 or more"
            )
        options["hybrid"] = dataclasses.asdict(hybrid)
    header = {"backend": backend, "corpus": corpus.fingerprint(), "options": options, "versions": _versions()}
    _check_out(out, restart)
    made = missing_folders(out)
    begun = (out / BUILDING).is_dir()
    journal = Journal(out / BUILDING, header)
    try:
        return _run(corpus, out, backend, options, journal, shown, bm25, dense)
    except UserError:
        if not begun:  # the user has to change the request, so there is no build to continue
            _remove_parts(out)
            remove_empty(made)
        raise
    except OSError as error:  # of writing: errors of reading the corpus are UserErrors
        raise UserError(
            f"--out {out}: {error}; correct this, then the same command continues the build"
        ) from error
    finally:
        journal.close()


def _run(
    corpus: Corpus,
    out: Path,
    backend: str,
    options: dict[str, Any],
    journal: Journal,
    shown: Progress,
    bm25: Bm25Options,
    dense: DenseOptions,
) -> Manifest:
    began = time.monotonic()
    try:
        passages = _store_passages(corpus, out, journal, shown, "bm25" in options)
        if "bm25" in options:
            counts = write_postings(out / BM25, journal, shown, bm25.k1, bm25.b)
            options["bm25"] = {**options["bm25"], "method": "lucene", "stemmer": "english", **counts}
        if "dense" in options:
            from sorl_tools.index.build.dense import write_vectors

            options["dense"] = write_vectors(out, passages, journal, shown, dense)
    finally:
        journal.add({"stage": "spent", "seconds": round(time.monotonic() - began, 3)}, now=True)
    return _finish(out, backend, len(passages), corpus, options, journal, shown)


def _checked_bm25(options: Bm25Options) -> dict[str, Any]:
    if not 0 <= options.k1 < float("inf") or not 0 <= options.b <= 1:
        raise UserError(f"--k1 {options.k1} --b {options.b}: k1 must be 0 or more, and b from 0 to 1")
    return dataclasses.asdict(options)


def _check_out(out: Path, restart: bool) -> None:
    """Make sure that ``out`` may be written to, and empty it on ``restart``."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out}: it is a file; give a folder")
    if not any(out.iterdir()):
        return
    ours = (out / NAME).is_file() or (out / BUILDING / "journal.jsonl").is_file()
    if not ours:
        raise UserError(f"--out {out}: the folder holds other files; give a new or an empty one")
    if restart:
        _remove_parts(out)
    elif (out / NAME).is_file():
        manifest = read_manifest(out)
        raise UserError(
            f"--out {out}: it holds a finished {manifest.backend} index of {manifest.passages:,} passages; give "
            "another folder, or replace the index with --restart"
        )


def _remove_parts(out: Path) -> None:
    """Delete everything that a build writes."""
    for part in (NAME, "passages.jsonl", "offsets.npy"):
        (out / part).unlink(missing_ok=True)
    for part in (BM25, DENSE, BUILDING):
        shutil.rmtree(out / part, ignore_errors=True)


def _store_passages(
    corpus: Corpus, out: Path, journal: Journal, progress: Progress, count_words: bool
) -> PassageFile:
    """Copy the passages into ``out``; for BM25, count their words at the same time."""
    done = journal.last("passages") or {"passages": 0, "file": 0, "row": 0, "bytes": 0, "scratch": {}}
    if journal.last("stored") is None:
        text = journal.append_to(out / "passages.jsonl", done["bytes"])
        ends = journal.append_to(journal.folder / "ends.bin", done["passages"] * 8)
        words = TokenScratch(journal, done["scratch"]) if count_words else None
        rows = corpus.rows(done["file"], done["row"])
        total = done["passages"]
        progress.start("passages", 0, total)
        while chunk := list(islice(rows, CHUNK)):
            lengths = []
            for row in chunk:
                line = PassageFile.line(row.passage)
                text.write(line)
                lengths.append(len(line))
            ends.write(text.length - sum(lengths) + np.cumsum(lengths, dtype=np.int64))
            if words is not None:
                words.add([_text(row.passage) for row in chunk])
            total += len(chunk)
            state = {"passages": total, "file": chunk[-1].file, "row": chunk[-1].row, "bytes": text.length}
            journal.add(
                {"stage": "passages", **state, "scratch": words.lengths() if words is not None else {}}
            )
            progress.advance(len(chunk))
        text.close()
        ends.close()
        if words is not None:
            words.close()
        if not total:
            raise UserError(f"{', '.join(map(str, corpus.sources))}: the corpus has no passages")
        _write_offsets(journal.folder / "ends.bin", out / "offsets.npy", total)
        journal.add({"stage": "stored"}, now=True)
    return PassageFile(out)


def _write_offsets(ends: Path, offsets: Path, passages: int) -> None:
    with offsets.open("wb") as file, ends.open("rb") as source:
        file.write(npy_header((passages + 1,), np.int64))
        file.write(np.zeros(1, dtype=np.int64).tobytes())
        shutil.copyfileobj(source, file)


def _text(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}"


def _finish(
    out: Path,
    backend: str,
    passages: int,
    corpus: Corpus,
    options: dict[str, Any],
    journal: Journal,
    progress: Progress,
) -> Manifest:
    began = time.monotonic()
    paths = [out / "passages.jsonl", out / "offsets.npy"]
    paths += [path for part in (BM25, DENSE) if part in options for path in sorted((out / part).iterdir())]
    progress.start("hashing", sum(path.stat().st_size for path in paths))
    files = {}
    for path in paths:
        size = path.stat().st_size
        files[path.relative_to(out).as_posix()] = {"bytes": size, "sha256": hash_file(path)}
        progress.advance(size)
    spent = [record["seconds"] for record in journal.records if record.get("stage") == "spent"]
    manifest = Manifest(
        backend=backend,
        passages=passages,
        corpus={
            "source": [str(source.resolve()) for source in corpus.sources],
            "hash": f"sha256:{files['passages.jsonl']['sha256']}",
        },
        parameters=options,
        files=files,
        versions=_versions(),
        built_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        build_seconds=round(sum(spent) + time.monotonic() - began, 3),
    )
    write_manifest(manifest, out)
    shutil.rmtree(journal.folder)
    return manifest


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # only what is there can have built it
    return found
