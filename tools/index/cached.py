"""BM25 indexes of corpus files: built once per content, kept in the cache folder and memory-mapped from there."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sorl_env.errors import UserError
from sorl_env.folders import cache_folder, missing_folders, remove_empty
from sorl_tools.corpus import Passage, PassageFile, check_corpus
from sorl_tools.index.manifest import FORMAT, hash_file, read_manifest
from sorl_tools.index.words import query_stems

if TYPE_CHECKING:
    from sorl_tools.index.postings import Postings


def tokenize(texts: Sequence[str]) -> list[list[str]]:
    """Lower-case words of two letters and more, stemmed and without stop words, exactly as ``bm25s.tokenize``."""
    return [query_stems(text) for text in texts]


def build_index(passages: Sequence[Passage]) -> Any:
    """A bm25s index of titles and texts, in memory.

    Raises:
        UserError: no passage has a word in it.
    """
    import bm25s

    words = tokenize([f"{passage.title}\n{passage.text}" for passage in passages])
    if not any(words):
        raise UserError(f"nothing to search: {len(passages)} passages without a word")
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return index


def hash_passages(passages: Sequence[Passage]) -> str:
    """``sha256:..`` over ids, titles and texts."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(f"{passage.id}\0{passage.title}\0{passage.text}\0".encode())
    return f"sha256:{digest.hexdigest()}"


def open_bm25(path: Path) -> tuple[PassageFile, Any, str]:
    """The passages of a corpus, their BM25 index, and its hash. The index of a new corpus file is built first.

    The index has the methods of a ``bm25s.BM25`` that are used here: ``get_tokens_ids``, ``get_scores_from_ids`` and
    ``scores``.

    Args:
        path: a ``.jsonl`` or ``.jsonl.gz`` file, or a folder that ``sorl-index`` built.

    Raises:
        UserError: the corpus or the index cannot be read, or the cache folder cannot be written.
    """
    if path.is_dir():
        manifest = read_manifest(path)
        if manifest.backend != "bm25":
            raise UserError(
                f"{path}: a {manifest.backend} index embeds its queries: serve it with sorl-serve, and give the task "
                "the server's address as search_url"
            )
        return *_load_index(path), manifest.hash
    check_corpus(path)
    digest = hash_file(path)
    passages, index = _load_index(_ensure_index(path, digest))
    return passages, index, f"sha256:{digest}"


def _ensure_index(path: Path, digest: str) -> Path:
    """The folder of the corpus's index, which is built now if it does not exist."""
    from sorl_tools.index.build.build import build

    # named by the format as well, because another version may store indexes differently
    folder = cache_folder() / "bm25" / f"{digest[:24]}-index{FORMAT}"
    if folder.is_dir():
        return folder
    made = missing_folders(folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot keep an index there ({error}); set SORL_CACHE") from error
    try:
        build([path], building)
        building.rename(folder)  # it appears complete or not at all; of several builders the first one wins
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
        remove_empty(made)  # left over if the corpus cannot be indexed
    return folder


@lru_cache(maxsize=4)
def _load_index(folder: Path) -> tuple[PassageFile, Postings]:
    from sorl_tools.index.bm25 import Bm25Index

    index = Bm25Index(folder, read_manifest(folder))
    return index.passages, index.postings
