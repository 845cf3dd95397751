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
from sorl_tools.corpus import PassageFile
from sorl_tools.index.bm25 import FOLDER as BM25
from sorl_tools.index.build.bm25 import CHUNK, TokenScratch, write_postings
from sorl_tools.index.build.corpora import Corpus
from sorl_tools.index.build.journal import Journal, npy_header
from sorl_tools.index.build.options import DENSE, Bm25Options, DenseOptions, HybridOptions
from sorl_tools.index.manifest import BUILDING, NAME, Manifest, hash_file, read_manifest, write_manifest
from sorl_tools.progress import Progress

BACKENDS = ("bm25", "dense", "hybrid")
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
    out = out.expanduser()
    options = _checked_options(backend, bm25, dense, hybrid)
    header = {"backend": backend, "corpus": corpus.fingerprint(), "options": options, "versions": _versions()}
    _check_out(out, restart)
    made = missing_folders(out)
    begun = (out / BUILDING).is_dir()
    journal = Journal(out / BUILDING, header)
    try:
        progress = progress or Progress(quiet=True)
        return _Build(corpus, out, backend, options, journal, progress).run(bm25, dense)
    except UserError:
        if not begun:  # the user has to change the request, so there is no build to continue
            _remove_parts(out)
            remove_empty(made)
        raise
    except OSError as error:  # of writing: errors of reading the corpus are UserErrors
        raise UserError(f"--out {out}: {error}; then the same command continues") from error
    finally:
        journal.close()


def _checked_options(
    backend: str, bm25: Bm25Options, dense: DenseOptions, hybrid: HybridOptions
) -> dict[str, dict[str, Any]]:
    """The options of each part of the backend, checked; an unfinished build continues only with the same."""
    options: dict[str, dict[str, Any]] = {}
    if backend != "dense":
        if not 0 <= bm25.k1 < float("inf") or not 0 <= bm25.b <= 1:
            raise UserError(f"--k1 {bm25.k1} --b {bm25.b}: k1 must be 0 or more, and b from 0 to 1")
        options["bm25"] = dataclasses.asdict(bm25)
    if backend != "bm25":
        from sorl_tools.index.build.dense import dense_request

        options["dense"] = dense_request(dense)
    if backend == "hybrid":
        if hybrid.rrf_k < 0 or hybrid.depth < 1:
            raise UserError(f"--rrf_k {hybrid.rrf_k} --depth {hybrid.depth}: give 0 or more, and 1 or more")
        options["hybrid"] = dataclasses.asdict(hybrid)
    return options


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


@dataclass
class _Build:
    """A build under way, and its stages."""

    corpus: Corpus
    out: Path
    backend: str
    options: dict[str, dict[str, Any]]
    journal: Journal
    progress: Progress

    def run(self, bm25: Bm25Options, dense: DenseOptions) -> Manifest:
        began = time.monotonic()
        options = self.options
        try:
            passages = self._store_passages()
            if "bm25" in options:
                counts = write_postings(self.out / BM25, self.journal, self.progress, bm25.k1, bm25.b)
                options["bm25"] = {**options["bm25"], "method": "lucene", "stemmer": "english", **counts}
            if "dense" in options:
                from sorl_tools.index.build.dense import write_vectors

                options["dense"] = write_vectors(self.out, passages, self.journal, self.progress, dense)
        finally:
            self.journal.add({"stage": "spent", "seconds": round(time.monotonic() - began, 3)}, now=True)
        return self._finish(len(passages))

    def _store_passages(self) -> PassageFile:
        """Copy the passages into ``out``; for BM25, count their words at the same time."""
        if self.journal.last("stored") is None:
            total = self._copy_passages()
            if not total:
                raise UserError(f"{', '.join(map(str, self.corpus.sources))}: the corpus has no passages")
            _write_offsets(self.journal.folder / "ends.bin", self.out / "offsets.npy", total)
            self.journal.add({"stage": "stored"}, now=True)
        return PassageFile(self.out)

    def _copy_passages(self) -> int:
        """Copy the passages that are not copied yet; returns how many there are in all."""
        journal = self.journal
        done = journal.last("passages") or {"passages": 0, "file": 0, "row": 0, "bytes": 0, "scratch": {}}
        text = journal.append_to(self.out / "passages.jsonl", done["bytes"])
        ends = journal.append_to(journal.folder / "ends.bin", done["passages"] * 8)
        words = TokenScratch(journal, done["scratch"]) if "bm25" in self.options else None
        rows = self.corpus.rows(done["file"], done["row"])
        total = int(done["passages"])
        self.progress.start("passages", 0, total)
        while chunk := list(islice(rows, CHUNK)):
            lines = [PassageFile.line(row.passage) for row in chunk]
            ends.write(text.length + np.cumsum([len(line) for line in lines], dtype=np.int64))
            text.write(b"".join(lines))
            if words is not None:
                words.add([f"{row.passage.title}\n{row.passage.text}" for row in chunk])
            total += len(chunk)
            state = {"passages": total, "file": chunk[-1].file, "row": chunk[-1].row, "bytes": text.length}
            scratch = {} if words is None else words.lengths()
            journal.add({"stage": "passages", **state, "scratch": scratch})
            self.progress.advance(len(chunk))
        for file in (text, ends, words):
            if file is not None:
                file.close()
        return total

    def _finish(self, passages: int) -> Manifest:
        """Hash the files, write the manifest and remove the journal."""
        began = time.monotonic()
        out = self.out
        paths = [out / "passages.jsonl", out / "offsets.npy"]
        paths += [
            path for part in (BM25, DENSE) if part in self.options for path in sorted((out / part).iterdir())
        ]
        self.progress.start("hashing", sum(path.stat().st_size for path in paths))
        files = {
            path.relative_to(out).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": hash_file(path, self.progress.advance),
            }
            for path in paths
        }
        spent = [record["seconds"] for record in self.journal.records if record.get("stage") == "spent"]
        manifest = Manifest(
            backend=self.backend,
            passages=passages,
            corpus={
                "source": [str(source.resolve()) for source in self.corpus.sources],
                "hash": f"sha256:{files['passages.jsonl']['sha256']}",
            },
            parameters=self.options,
            files=files,
            versions=_versions(),
            built_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            build_seconds=round(sum(spent) + time.monotonic() - began, 3),
        )
        write_manifest(manifest, out)
        shutil.rmtree(self.journal.folder)
        return manifest


def _write_offsets(ends: Path, offsets: Path, passages: int) -> None:
    with offsets.open("wb") as file, ends.open("rb") as source:
        file.write(npy_header((passages + 1,), np.int64))
        file.write(np.zeros(1, dtype=np.int64).tobytes())
        shutil.copyfileobj(source, file)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not installed, so it was not used
    return found
