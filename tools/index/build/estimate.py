"""What an index will take, from a few constants that were measured on English encyclopedia and medical text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sorl_env.errors import UserError
from sorl_tools.index.faiss_kinds import factory_string

TEXT_BYTES = 6.3  # a word of a passage, stored with title and id
DISTINCT = 0.55  # different stems, stop words left out, for a word of a passage
VOCABULARY = (17.0, 0.57)  # words = a * tokens ** b, Heaps' law
WORD_BYTES_DISK = 8 + 8 + 8 + 4 + 4  # text, two offsets, id, largest score
WORD_BYTES_BUILD = 350  # a stem and its spellings in two dictionaries
PASSAGES_A_SECOND = 16_000  # of 100 words; read, stored and counted, one core
POSTINGS_A_SECOND = 8_000_000
HASHED_A_SECOND = 400e6
BASE_MEMORY = 60e6  # Python and numpy
MODEL_MEMORY = 900e6  # torch and a small model
BLOCK_MEMORY = 20 * 16e6  # one block of postings being sorted


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds, one core.

    Args:
        disk: the index.
        build_disk: the index and what the build keeps beside it for a while.
        build_memory: the peak of the building process, pages of mapped files left out.
        private_memory: of a process that searches.
        shared_memory: mapped files, when all of their pages are in use; processes share them.
        build_seconds: all stages.
        embedding_note: the rate that embedding was reckoned at, empty for BM25.
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
        dim: numbers a vector.
        faiss: as for the build.
        embed_rate: passages embedded a second; None: reckoned for one core from ``dim``, for want of better.

    Raises:
        UserError: an argument is not positive, or ``faiss`` is not a kind whose size is known.
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
        scratch += postings * (6 + 2)  # and the chunks' own lists of words
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
        note = f", {'' if embed_rate else 'guessing '}{rate:,.{0 if rate >= 10 else 1}f} passages embedded a second"
    seconds += disk / HASHED_A_SECOND
    return Estimate(disk, disk + scratch, memory, private, disk, seconds, note)


def vector_bytes(faiss: str, dim: int, passages: int) -> float:
    """Bytes that one vector takes.

    Raises:
        UserError: the size of this factory string is not known.
    """
    factory = factory_string(faiss, dim, passages)
    if not factory:
        return dim * 4
    lists = 8 if "IVF" in factory else 0  # the passage's number, in its list
    links = 4 * 2 * int(found[1]) + 12 if (found := re.search(r"HNSW(\d+)", factory)) else 0
    for pattern, size in (("SQfp16", 2.0), ("SQ8", 1.0), ("SQ4", 0.5), ("Flat", 4.0)):
        if pattern in factory:
            return dim * size + lists + links
    if product := re.search(r"PQ(\d+)(?:x(\d+))?", factory.rpartition(",")[2]):
        return math.ceil(int(product[1]) * int(product[2] or 8) / 8) + lists + links
    raise UserError(
        f"--faiss {faiss}: no estimate for this factory string; build a small one and look at its size"
    )


def _rate(dim: int) -> float:
    """Passages a second on one core: 12 layers as E5 has them from 512 numbers on, six as MiniLM below."""
    layers = 12 if dim >= 512 else 6
    return 20.0 * (384**2 * 6) / (dim**2 * layers)
