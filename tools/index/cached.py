"""BM25 indexes of corpus files: built once per content, kept in the cache folder and memory-mapped from there."""

from __future__ import annotations

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from sorl_env.errors import UserError
from sorl_env.folders import cache_folder, missing_folders, remove_empty
from sorl_tools.corpus import check_corpus
from sorl_tools.index.index import Index, open_index
from sorl_tools.index.manifest import FORMAT, hash_file, read_manifest

_open = lru_cache(maxsize=4)(open_index)


def open_bm25(path: Path) -> tuple[Index, str]:
    """The BM25 index of a corpus, and the hash of what is searched. The index of a new corpus file is built first.

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
        return _open(path), manifest.hash
    check_corpus(path)
    digest = hash_file(path)
    # named by the format as well, because another version may store indexes differently
    folder = cache_folder() / "bm25" / f"{digest[:24]}-index{FORMAT}"
    if not folder.is_dir():
        _build(path, folder)
    return _open(folder), f"sha256:{digest}"


def _build(path: Path, folder: Path) -> None:
    """Build the index of a corpus, which appears complete or not at all; of several builders the first one wins."""
    from sorl_tools.index.build.build import build

    made = missing_folders(folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
    except OSError as error:
        raise UserError(f"{folder.parent}: cannot keep an index there ({error}); set SORL_CACHE") from error
    try:
        build([path], building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
        remove_empty(made)  # left over if the corpus cannot be indexed
