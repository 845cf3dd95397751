"""The files beside prepared data, and the manifest that says what each data file is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json

MANIFEST = "sorl_data.json"
PAIRS = "overlap.jsonl"
CARD = "README.md"
Manifest = dict[str, Any]


def jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON lines, keys in the order of the rows."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a prepared folder, None if it is another kind of folder."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = read_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); prepare the folder again") from error
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("files"), dict)
        or "name" not in manifest
    ):
        raise UserError(f"{path}: not a manifest of sorl-data; prepare the folder again")
    return manifest
