"""Corpora of any size for benchmarks: real texts under made-up titles, and vectors near real ones."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from sorl_tools.corpus import Passage
from sorl_tools.index.build.corpora import Corpus

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu bran clar dren flor grim".split()
QUERIES = 300


def made_up_corpus(source: Path, size: int) -> Iterator[Passage]:
    """``size`` passages, the source's texts in turn, each title new and no text twice the same."""
    draw = random.Random(0)
    texts = [row.passage.text for row in islice(Corpus([source]).rows(), size)]
    for number in range(size):
        name = " ".join("".join(draw.choices(SYLLABLES, k=3)).title() for _ in range(2))
        turn, place = divmod(number, len(texts))
        words = texts[place].split()
        cut = turn % max(1, len(words))
        yield Passage(str(number), f"{name} ({number})", " ".join(words[cut:] + words[:cut]))


def write_corpus(path: Path, source: Path, size: int) -> None:
    """Write the corpus and, beside it, queries: what some of its passages begin with."""
    every = max(1, size // QUERIES)
    queries = []
    with path.open("w", encoding="utf-8") as file:
        for number, passage in enumerate(made_up_corpus(source, size)):
            contents = f'"{passage.title}"\n{passage.text}'
            file.write(json.dumps({"id": passage.id, "contents": contents}, ensure_ascii=False) + "\n")
            if number % every == 0:
                queries.append(" ".join(passage.text.split()[:8]))
    with gzip.open(path.with_name("questions.jsonl.gz"), "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"question": query}) + "\n" for query in queries[:QUERIES])
    path.with_name("queries.json").write_text(json.dumps(queries[:QUERIES]))


def write_vectors(path: Path, source: Path, size: int) -> None:
    """Repeat the source's vectors, each time with noise, normalized."""
    vectors = np.load(source, mmap_mode="r")
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(size, vectors.shape[1]))
    draw = np.random.default_rng(0)
    for start in range(0, size, 8192):
        rows = np.arange(start, min(start + 8192, size)) % len(vectors)
        noise = draw.standard_normal((len(rows), vectors.shape[1]), dtype=np.float32)
        block = vectors[rows] + noise * np.float32(0.2 / vectors.shape[1] ** 0.5)
        out[start : start + len(rows)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    out.flush()
