"""Check that the files of an index are undamaged, and that it finds the passages that are in it."""

from __future__ import annotations

import random
from pathlib import Path

from sorl_env.check import Check
from sorl_env.errors import UserError
from sorl_tools.index.index import Index
from sorl_tools.index.manifest import Manifest, find_damage
from sorl_tools.progress import Progress

QUERY_WORDS = 24
WANTED = {"bm25": 0.9, "dense": 0.8, "hybrid": 0.9}  # a lower self-recall is a fault, see check_recall


def check_files(folder: Path, manifest: Manifest, progress: Progress) -> list[Check]:
    """Compare every file with its hash in the manifest."""
    progress.start("hashing", manifest.bytes)
    damaged = find_damage(folder, manifest, progress.advance)
    changed = "changed since the build: copy it again, or build the index again"
    return [
        Check(name, name not in damaged, changed if name in damaged else "as built")
        for name in manifest.files
    ]


def check_recall(index: Index, sample: int, seed: int = 0) -> Check:
    """Search for sampled passages by their titles and first words.

    A passage counts as found if it, or one with the same text, is among the first ten hits. Passages of fewer than five
    words are left out. If more than a tenth are missed (for vectors, a fifth), the index is taken to be faulty.

    Raises:
        UserError: ``sample`` is less than 1, or no sampled passage has five words.
    """
    if sample < 1:
        raise UserError(f"--sample {sample}: give at least 1")
    passages = index.passages
    places = random.Random(seed).sample(range(len(passages)), min(sample, len(passages)))
    chosen = [passages[place] for place in places]
    wanted = [passage for passage in chosen if len(passage.text.split()) >= 5]
    if not wanted:
        raise UserError(f"none of {len(chosen)} sampled passages has five words to search by")
    queries = [" ".join(f"{p.title} {p.text}".split()[:QUERY_WORDS]) for p in wanted]
    found = index.search(queries, 10)
    hits = sum(
        any((hit.passage.title, hit.passage.text) == (passage.title, passage.text) for hit in one)
        for passage, one in zip(wanted, found, strict=True)
    )
    share, least = hits / len(wanted), WANTED[index.manifest.backend]
    detail = f"{hits} of {len(wanted)} passages found by their first words ({share:.3f}; wanted {least})"
    return Check("self-recall", share >= least, detail)
