"""Estimate what an index takes, from constants measured on English encyclopedia and medical text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sorl_env.errors import UserError
from sorl_tools.index.faiss_kinds import factory_string

TEXT_BYTES = 6.3  # per word of a passage, as stored with title and id
DISTINCT = 0.55  # different stems in a passage, without stop words, per word
VOCABULARY = (17.0, 0.57)  # words = a * tokens ** b, Heaps' law
WORD_BYTES_DISK = 8 + 8 + 8 + 4 + 4  # per word of the vocabulary: text, two offsets, id, largest score
WORD_BYTES_BUILD = 350  # per word of the vocabulary: a stem and its spellings in two dictionaries
PASSAGES_A_SECOND = 16_000  # of 100 words, read, stored and counted on one core
POSTINGS_A_SECOND = 8_000_000
HASHED_A_SECOND = 400e6
BASE_MEMORY = 60e6  # Python and numpy
MODEL_MEMORY = 900e6  # torch and a small model
BLOCK_MEMORY = 20 * 16e6  # while one block of postings is sorted


@dataclass(frozen=True)
class Estimate:
    """Bytes, and seconds on one core.

    Args:
        disk: size of the index.
        build_disk: size of the index and of the build's temporary files.
        build_memory: peak memory of the build, without pages of mapped files.
        private_memory: memory of each process that searches.
        shared_memory: the mapped files, which processes share, if all of their pages are in use.
        build_seconds: duration of all stages together.
        embedding_note: the assumed rate of embedding; empty for BM25.
    """

    disk: float
    build_disk: float
    build_memory: float
    private_memory: float
    shared_memory: float
    build_seconds: float
    embedding_note: str = ""


def estimate(
    passages: int,
    backend: str = "bm25",
    *,
    words: float = 100.0,
    dim: int = 768,
    faiss: str = "flat",
    embed_rate: float | None = None,
) -> Estimate:
    """Estimate an index of ``passages`` passages of ``words`` words each.

    Args:
        dim: elements of a vector.
        faiss: kind of index, as for the build.
        embed_rate: passages embedded per second; None guesses it from ``dim``, for one core.

    Raises:
        UserError: an argument is not positive, or the size of this kind of index is unknown.
    """
    for name, value in (
        ("passages", passages),
        ("words", words),
        ("dim", dim),
        ("embed_rate", 1 if embed_rate is None else embed_rate),
    ):
        if not 0 < value < math.inf:
            raise UserError(f"--{name} {value}: give a number above 0")
    text = passages * (words * TEXT_BYTES + 8)
    disk, scratch, memory, private = text, passages * 8.0, BASE_MEMORY, BASE_MEMORY
    seconds = passages / PASSAGES_A_SECOND * (words / 100)
    if backend in ("bm25", "hybrid"):
        postings = passages * words * DISTINCT
        vocabulary = VOCABULARY[0] * (passages * words) ** VOCABULARY[1]
        disk += postings * 8 + vocabulary * WORD_BYTES_DISK
        scratch += postings * (6 + 2)  # 2 for the chunks' own lists of words
        block = min(BLOCK_MEMORY, postings * 20)
        memory += vocabulary * WORD_BYTES_BUILD + passages * 24 + block
        private += passages * 4
        seconds += postings / POSTINGS_A_SECOND
    note = ""
    if backend in ("dense", "hybrid"):
        size = passages * vector_bytes(faiss, dim, passages)
        flat = passages * dim * 4.0
        disk += size
        scratch += 0 if faiss == "flat" else flat
        memory += MODEL_MEMORY + (0 if faiss == "flat" else size + min(passages, 262_144) * dim * 4)
        private += MODEL_MEMORY
        rate = embed_rate or _rate(dim)
        seconds += passages / rate
        note = f", {'' if embed_rate else 'guessing '}{rate:,.{0 if rate >= 10 else 1}f} passages embedded per second"
    seconds += disk / HASHED_A_SECOND
    return Estimate(disk, disk + scratch, memory, private, disk, seconds, note)


def vector_bytes(faiss: str, dim: int, passages: int) -> float:
    """Number of bytes that one vector takes.

    Raises:
        UserError: the size is not known for this factory string.
    """
    factory = factory_string(faiss, dim, passages)
    if not factory:
        return dim * 4
    lists = 8 if "IVF" in factory else 0  # the passage's number, stored in its list
    links = 4 * 2 * int(found[1]) + 12 if (found := re.search(r"HNSW(\d+)", factory)) else 0
    for pattern, size in (("SQfp16", 2.0), ("SQ8", 1.0), ("SQ4", 0.5), ("Flat", 4.0)):
        if pattern in factory:
            return dim * size + lists + links
    if product := re.search(r"PQ(\d+)(?:x(\d+))?", factory.rpartition(",")[2]):
        return math.ceil(int(product[1]) * int(product[2] or 8) / 8) + lists + links
    raise UserError(f"--faiss {faiss}: no estimate for this factory string; build a small index")


def _rate(dim: int) -> float:
    """Passages per second on one core, for 12 layers (as E5) from 512 elements on, and six (as MiniLM) below."""
    layers = 12 if dim >= 512 else 6
    return 20.0 * (384**2 * 6) / (dim**2 * layers)
