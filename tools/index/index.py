"""An index that has been opened: BM25, vectors, or both, over the same passages.

Its ``manifest.json`` says what it holds, what it was built from and how, and the hashes of its files and of itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_tools.corpus import Passage, PassageFile
from sorl_tools.index.words import Bm25, open_words

NAME = "manifest.json"
REQUEST = "request.json"  # what an unfinished build was asked for; removed when it is finished
FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """The facts of an index."""

    backend: str  # ``bm25``, ``dense`` or ``hybrid``
    passages: int
    corpus: Mapping[
        str, Any
    ]  # ``source``: the paths as given; ``hash``: of the passages' ids, titles and texts
    parameters: Mapping[
        str, Mapping[str, Any]
    ]  # of each part: options, and counts such as ``words`` and ``dim``
    files: Mapping[str, Mapping[str, Any]]  # relative path to ``{"bytes": .., "sha256": ..}``
    versions: Mapping[str, str]  # of the packages that the index was built with
    built_at: str  # when the build was finished, UTC
    build_seconds: float  # without interruptions
    format: int = FORMAT

    @property
    def checksum(self) -> str:
        """SHA-256 of all fields, by which a manifest that was changed is noticed."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def hash(self) -> str:
        """``sha256:..`` of the files' hashes and of what else answers depend on: equal for equal answers."""
        lines = [f"{name}\0{entry['sha256']}\n" for name, entry in sorted(self.files.items())]
        dense = self.parameters.get("dense", {})
        asked = {
            "hybrid": self.parameters.get("hybrid"),
            **{name: dense.get(name) for name in ("query_prefix", "settings")},
        }
        if self.backend != "bm25":
            lines.append(json.dumps(asked, sort_keys=True))
        return f"sha256:{hashlib.sha256(''.join([self.backend, *lines]).encode()).hexdigest()}"

    @property
    def bytes(self) -> int:
        """Size of the index on disk."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index. Raises UserError if there is none, or a file that it names is not of its size."""
    path = folder / NAME
    if folder.is_file():
        raise UserError(f"{folder}: it is a file; give the folder of an index")
    if not path.is_file() and (folder / REQUEST).is_file():
        raise UserError(f"{folder}: the build was not finished; the same build command continues it")
    if not path.is_file():
        raise UserError(f"{path}: there is no index; build one with: sorl-index build CORPUS --out DIR")
    try:
        fields = dict(read_json(path.read_bytes()))
        checksum = fields.pop("checksum", None)
        if (found := fields.get("format")) != FORMAT:
            raise ValueError(f"format {found}, but this version reads {FORMAT}")
        manifest = Manifest(**fields)
        if manifest.checksum != checksum:
            raise ValueError("it was changed since the build")
    except (ValueError, TypeError) as error:
        again = f"sorl-index build CORPUS --out {folder} --restart"
        raise UserError(f"{path}: not a manifest ({error}); build the index again: {again}") from error
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{file}: missing, or not of {entry['bytes']} bytes; copy it again, or build the index again"
            )
    return manifest


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write a manifest, completely or not at all."""
    fields = {**dataclasses.asdict(manifest), "checksum": manifest.checksum}
    scratch = folder / f"{NAME}.tmp"
    scratch.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, folder / NAME)


def find_damage(
    folder: Path, manifest: Manifest, on_read: Callable[[int], object] = lambda count: None
) -> list[str]:
    """The files of an index that are not as they were built. All are read, several at a time; see ``hash_file``."""
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(lambda name: hash_file(folder / name, on_read), manifest.files)
        wanted = [entry["sha256"] for entry in manifest.files.values()]
        return [name for name, one, other in zip(manifest.files, hashes, wanted, strict=True) if one != other]


def hash_file(path: Path, on_read: Callable[[int], object] = lambda count: None) -> str:
    """SHA-256 of a file, in hexadecimal; ``on_read`` is called with the number of bytes after each block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()


BM25, DENSE = "bm25", "dense"  # folders, and names of the parts in a manifest
Ranking = list[tuple[int, float]]  # (place in the corpus, score), best first

# Reading a passage from the file takes as long as finding it, and the rollouts of a group find the same ones.
CACHED_PASSAGES = 1 << 14


class Hit(NamedTuple):
    """A passage that was found. Scores can be compared within one query only; their scale depends on the backend."""

    passage: Passage
    score: float


class Index:
    """A folder built by ``sorl-index``, opened by ``open_index``. Threads may search one index at the same time."""

    def __init__(self, folder: Path, manifest: Manifest, model: str | None, device: str | None) -> None:
        self.manifest = manifest
        self.passages = PassageFile(folder)
        self._passage = lru_cache(CACHED_PASSAGES)(self.passages.__getitem__)
        if len(self.passages) != manifest.passages:
            raise ValueError(f"{len(self.passages)} passages, but {manifest.passages} in the manifest")
        parts = manifest.parameters
        self.words = Bm25(open_words(folder / BM25, manifest.passages)) if BM25 in parts else None
        self._vectors = None
        if DENSE in parts:
            from sorl_tools.index.vectors import DensePart

            self._vectors = DensePart(folder / DENSE, parts[DENSE], manifest.passages, model, device)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """For each query at most ``top_k`` passages, best first; equal scores in the order of the corpus. With BM25, a
        passage that shares no word with a query is never a hit. A batch of queries is embedded at once; its size
        affects how scores of vectors are rounded. Raises ``UserError`` if ``top_k`` is less than 1, or the encoder does
        not answer."""
        if top_k < 1:
            raise UserError(f"top_k={top_k}: ask for 1 passage or more")
        top_k = min(top_k, self.manifest.passages)
        if not queries:
            return []
        parts = [part for part in (self.words, self._vectors) if part is not None]
        if len(parts) == 1:
            found = parts[0].top(queries, top_k)
        else:
            hybrid = self.manifest.parameters["hybrid"]
            depth = min(max(hybrid["depth"], top_k), self.manifest.passages)
            rankings = zip(*(part.top(queries, depth) for part in parts), strict=True)
            fused = (
                fuse([[place for place, _ in one] for one in both], hybrid["rrf_k"]) for both in rankings
            )
            found = [ranking[:top_k] for ranking in fused]
        return [[Hit(self._passage(place), score) for place, score in hits] for hits in found]

    def close(self) -> None:
        """Close the file of passages; the index cannot be searched afterwards."""
        self.passages.close()


def open_index(path: str | Path, *, model: str | None = None, device: str | None = None) -> Index:
    """Open a folder built by ``sorl-index``. Its files are memory-mapped, so processes share one copy of them. All
    files are read once and compared with their hashes, so a damaged index is refused and never searched. ``model`` is
    the folder or name of the embedding model, or the address of its server, if it has moved since the build; BM25
    ignores it. ``device`` is the torch device that embeds the queries, such as ``cuda:0``; None takes a GPU if there is
    one. Raises ``UserError`` if there is no index, it is unfinished or damaged, or a package or model that it needs is
    missing."""
    folder = Path(path).expanduser()
    manifest = read_manifest(folder)
    if damaged := find_damage(folder, manifest):
        raise UserError(
            f"{folder}: {', '.join(damaged)} changed since the build; copy it, or build the index, again"
        )
    try:
        return Index(folder, manifest, model, device)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be opened ({error}); build the index again") from error


def fuse(rankings: Sequence[Sequence[int]], rrf_k: int) -> Ranking:
    """Reciprocal rank fusion: (place, sum of ``1 / (rrf_k + rank)``), best first. Ranks count from 1; ties by place.

    >>> fuse([[7, 3], [3, 5]], rrf_k=1)
    [(3, 0.8333333333333333), (7, 0.5), (5, 0.3333333333333333)]
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, place in enumerate(ranking, start=1):
            scores[place] = scores.get(place, 0.0) + 1 / (rrf_k + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
