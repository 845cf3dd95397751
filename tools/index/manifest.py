"""``manifest.json``: what an index holds, what it was built from and how, and the hashes of its files and of itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json

NAME = "manifest.json"
BUILDING = "building"  # folder of a build under way; removed when it is finished
FORMAT = 2


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
    def checksum(self) -> str:
        """SHA-256 of all fields, by which a manifest that was changed is noticed."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

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
        fields = dict(read_json(path.read_bytes()))
        if fields.get("format") != FORMAT:
            raise UserError(
                f"{path}: format {fields.get('format')}, but this version reads {FORMAT}; build the index again: "
                f"sorl-index build CORPUS --out {folder} --restart"
            )
        checksum = fields.pop("checksum")
        manifest = Manifest(**fields)
        sizes = {name: int(entry["bytes"]) for name, entry in manifest.files.items()}
        if manifest.checksum != checksum:
            raise ValueError("it was changed since the build")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a manifest ({error}); build the index again") from error
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{folder}: {name} is missing; copy it again, or build the index again")
        if file.stat().st_size != size:
            raise UserError(f"{file}: {file.stat().st_size} bytes, but {size} in the manifest; copy it again")
    return manifest


def find_damage(
    folder: Path, manifest: Manifest, on_read: Callable[[int], None] = lambda count: None
) -> list[str]:
    """The files of an index that are not as they were built. All are read, several at a time.

    Args:
        on_read: called with the number of bytes after each block.
    """
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(lambda name: hash_file(folder / name, on_read), manifest.files)
        return [
            name
            for (name, entry), digest in zip(manifest.files.items(), hashes, strict=True)
            if digest != entry["sha256"]
        ]


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
    fields = {**dataclasses.asdict(manifest), "checksum": manifest.checksum}
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
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
