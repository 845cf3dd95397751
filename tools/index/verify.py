"""Is an index whole, and does it find what is in it?"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from sorl_env.errors import UserError
from sorl_tools.corpus import PassageFile
from sorl_tools.index.manifest import Manifest
from sorl_tools.index.open import Index
from sorl_tools.progress import Progress

QUERY_WORDS = 24
WANTED = {"bm25": 0.9, "dense": 0.8, "hybrid": 0.9}  # self-recall below this is a fault, see check_recall


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    passed: bool
    detail: str


def check_files(folder: Path, manifest: Manifest, progress: Progress) -> list[Check]:
    """Compare every file with its hash in the manifest."""
    progress.start("hashing", manifest.bytes)
    checks = []
    for name, entry in manifest.files.items():
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                progress.advance(len(block))
        same = digest.hexdigest() == entry["sha256"]
        checks.append(
            Check(name, same, "as built" if same else "changed since the build: copy or build it again")
        )
    return checks


def check_recall(index: Index, folder: Path, sample: int, seed: int = 0) -> Check:
    """Search for sampled passages by their own titles and first words.

    A passage counts as found when it, or one that reads the same, is among the first ten. Passages shorter than a few
    words are left out. What is missed beyond a tenth (for vectors, a fifth) is taken for a fault of the index.

    Raises:
        UserError: ``sample`` is less than 1, or no passage has a few words.
    """
    if sample < 1:
        raise UserError(f"--sample {sample}: search for 1 passage or more")
    passages = PassageFile(folder)
    places = random.Random(seed).sample(range(len(passages)), min(sample, len(passages)))
    chosen = [passages[place] for place in places]
    wanted = [passage for passage in chosen if len(passage.text.split()) >= 5]
    if not wanted:
        raise UserError(f"{folder}: none of {len(chosen)} sampled passages has five words to search by")
    queries = [" ".join(f"{p.title} {p.text}".split()[:QUERY_WORDS]) for p in wanted]
    found = index.search(queries, 10)
    hits = sum(
        any((hit.passage.title, hit.passage.text) == (passage.title, passage.text) for hit in one)
        for passage, one in zip(wanted, found, strict=True)
    )
    share, least = hits / len(wanted), WANTED[index.manifest.backend]
    detail = f"{hits} of {len(wanted)} passages found by their first words ({share:.3f}; wanted {least})"
    return Check("self-recall", share >= least, detail)
