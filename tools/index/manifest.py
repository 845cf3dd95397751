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
REQUEST = "request.json"  # what an unfinished build was asked for; removed when it is finished
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
    """The files of an index that are not as they were built. All are read, several at a time.

    Args:
        on_read: called with the number of bytes after each block.
    """
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
