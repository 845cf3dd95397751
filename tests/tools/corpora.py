"""Small corpora, and the files that they are written to."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sorl_tools.corpus import Passage, PassageFile


def made_up(count: int, seed: int = 0) -> list[Passage]:
    """Passages of words that follow a long-tailed distribution, as text does."""
    draw = random.Random(seed)
    words = [f"{'abcdefghijklmnopqrst'[i % 20]}{'aeiou'[i % 5]}word{i:x}" for i in range(3000)]
    weights = [1 / (i + 1) for i in range(3000)]
    return [
        Passage(f"p{i}", f"Title {i}", " ".join(draw.choices(words, weights, k=draw.randint(0, 60))))
        for i in range(count)
    ]


def write_jsonl(path: Path, passages: Iterable[Passage]) -> Path:
    lines = (json.dumps({"id": p.id, "contents": f'"{p.title}"\n{p.text}'}) for p in passages)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_passages(passages: Iterable[Passage], folder: Path) -> PassageFile:
    """Write the files that ``PassageFile`` reads, and open them."""
    lines = [PassageFile.line(passage) for passage in passages]
    (folder / "passages.jsonl").write_bytes(b"".join(lines))
    np.save(folder / "offsets.npy", np.cumsum([0, *map(len, lines)], dtype=np.int64))
    return PassageFile(folder)
