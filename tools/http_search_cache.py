"""A cache of retrieval replies: the newest in memory, all of them in a file."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage

Key = tuple[str, int, str]  # fingerprint of the servers' index, top_k, query

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS replies (fingerprint TEXT, top_k INTEGER, query TEXT, passages TEXT, "
    "PRIMARY KEY (fingerprint, top_k, query)) WITHOUT ROWID"
)
_BUSY_S = 30.0


class ReplyCache:
    """Passages by index, ``top_k`` and query. Threads and processes may share it.

    Args:
        size: replies kept in memory, the least recently used one goes first.
        path: SQLite file that keeps every reply; None for memory alone.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(self, size: int = 4096, path: str | Path | None = None) -> None:
        if size < 1:
            raise UserError(f"cache size={size}: keep at least 1 reply")
        self._size = size
        self._recent: OrderedDict[Key, list[Passage]] = OrderedDict()
        self._lock = threading.Lock()
        self._path = None if path is None else Path(path).expanduser()
        self._file = None if self._path is None else _open(self._path)

    def get(self, key: Key) -> list[Passage] | None:
        """The passages, or None."""
        with self._lock:
            found = self._recent.get(key)
            if found is not None:
                self._recent.move_to_end(key)
                return found
            if self._file is None:
                return None
            row = self._file.execute(
                "SELECT passages FROM replies WHERE fingerprint = ? AND top_k = ? AND query = ?", key
            ).fetchone()
            if row is None:
                return None
            found = [Passage(*fields) for fields in json.loads(row[0])]
            self._keep(key, found)
            return found

    def put(self, items: Iterable[tuple[Key, Sequence[Passage]]]) -> None:
        """Keep replies. A file that cannot be written now raises OSError: a disk is full, or gone."""
        items = list(items)
        with self._lock:
            for key, passages in items:
                self._keep(key, list(passages))
            if self._file is None:
                return
            rows = [
                (*key, json.dumps([[p.id, p.title, p.text] for p in passages], ensure_ascii=False))
                for key, passages in items
            ]
            try:
                with self._file:
                    self._file.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", rows)
            except sqlite3.Error as error:
                raise OSError(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _keep(self, key: Key, passages: list[Passage]) -> None:
        self._recent[key] = passages
        self._recent.move_to_end(key)
        if len(self._recent) > self._size:
            self._recent.popitem(last=False)


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        file.execute("PRAGMA journal_mode = WAL")  # readers and one writer at a time
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute(_SCHEMA)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot keep replies there ({error}); name another file") from error
    return file
