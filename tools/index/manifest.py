"""``manifest.json``: what an index holds, what it was built from and how, and the hashes of its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json

NAME = "manifest.json"
BUILDING = "building"  # folder of a build's journal and scratch files; removed when the build is finished
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The facts of an index.

    Args:
        backend: ``bm25``, ``dense`` or ``hybrid``.
        passages: number of passages.
        corpus: ``source``: the paths as they were given; ``hash``: of the passages' ids, titles and texts.
        parameters: by part (``bm25``, ``dense``, ``hybrid``): the options, and counts such as ``words`` and ``dim``.
        files: relative path to ``{"bytes": .., "sha256": ..}``.
        versions: of the packages that the index was built with.
        built_at: when the build was finished, UTC.
        build_seconds: time that the build took, without interruptions.
    """

    backend: str
    passages: int
    corpus: Mapping[str, Any]
    parameters: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    built_at: str
    build_seconds: float
    format: int = FORMAT

    @property
    def hash(self) -> str:
        """``sha256:..`` of the hashes of the files: equal for indexes that give equal answers."""
        lines = [f"{name}\0{entry['sha256']}\n" for name, entry in sorted(self.files.items())]
        return f"sha256:{hashlib.sha256(''.join([self.backend, *lines]).encode()).hexdigest()}"

    @property
    def bytes(self) -> int:
        """Size of the index on disk."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an index.

    Raises:
        UserError: there is none, it cannot be read, or a file that it names is missing or has another size.
    """
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder}: {_no_manifest(folder)}")
    try:
        manifest = Manifest(**read_json(path.read_bytes()))
        sizes = {name: int(entry["bytes"]) for name, entry in manifest.files.items()}
        _check_form(manifest)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a manifest ({error}); build the index again") from error
    if manifest.format != FORMAT:
        raise UserError(
            f"{path}: format {manifest.format}, but this version reads {FORMAT}; build the index again"
        )
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{folder}: {name} is missing; copy it again, or build the index again")
        if file.stat().st_size != size:
            raise UserError(f"{file}: {file.stat().st_size} bytes, but {size} in the manifest; copy it again")
    return manifest


def _check_form(manifest: Manifest) -> None:
    """Raise TypeError or KeyError if a field has another type than it should."""
    if not all(isinstance(value, Mapping) for value in (manifest.corpus, *manifest.parameters.values())):
        raise TypeError("corpus and parameters must be objects")
    if not isinstance(manifest.passages, int) or not isinstance(manifest.build_seconds, int | float):
        raise TypeError("passages and build_seconds must be numbers")
    _ = manifest.corpus["hash"], [str(source) for source in manifest.corpus["source"]], manifest.hash


def _no_manifest(folder: Path) -> str:
    if folder.is_file():
        return "it is a file; give the folder of an index"
    if not folder.exists():
        return "no such folder; build an index with: sorl-index build CORPUS --out DIR"
    if (folder / BUILDING).is_dir():
        return "the build was not finished; the same build command continues it"
    return f"there is no index in it (no {NAME}); build one with: sorl-index build CORPUS --out DIR"


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write a manifest, completely or not at all."""
    path = folder / NAME
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def hash_file(path: Path, on_read: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file, in hexadecimal; ``on_read`` is called with the number of bytes after each block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()
