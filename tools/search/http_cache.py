"""A cache of retrieval replies: the most recent ones in memory, all of them in a file."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage

Key = tuple[str, int, str]  # fingerprint of the index, top_k, query

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS replies (fingerprint TEXT, top_k INTEGER, query TEXT, passages TEXT, used REAL, "
    "PRIMARY KEY (fingerprint, top_k, query))"
)
_INDEX = "CREATE INDEX IF NOT EXISTS replies_by_use ON replies (used)"
_WHERE = "WHERE fingerprint = ? AND top_k = ? AND query = ?"
_DROP = "DELETE FROM replies WHERE rowid IN (SELECT rowid FROM replies ORDER BY used LIMIT ?)"
_BUSY_S = 30.0
_USE_S = 3600.0  # the use of a reply is written to the file this often: a run that only reads hardly writes
_MB = 1_000_000


class ReplyCache:
    """Passages by index, ``top_k`` and query. Threads, and processes of one machine, may share it.

    Args:
        size: number of replies kept in memory; the least recently used one is dropped first.
        path: SQLite file that keeps replies between processes, on a local disk (its journal does not work over a
            network); None keeps them in memory only.
        max_file_mb: if the file grows larger, the tenth of its replies that was least recently used is deleted. A
            gigabyte holds about 350,000 searches of three passages of 100 words.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(self, size: int = 4096, path: str | Path | None = None, max_file_mb: float = 1000.0) -> None:
        if size < 1:
            raise UserError(f"cache size={size}: keep at least 1 reply")
        if max_file_mb <= 0:
            raise UserError(f"cache max_file_mb={max_file_mb}: give more than 0")
        self._max_bytes = max_file_mb * _MB
        self._size = size
        self._recent: OrderedDict[Key, list[Passage]] = OrderedDict()
        self._lock = threading.Lock()
        self._path = None if path is None else Path(path).expanduser()
        self._file = None if self._path is None else _open(self._path)

    def get(self, key: Key) -> list[Passage] | None:
        """The passages, or None. Raises OSError as ``put``."""
        with self._lock:
            found = self._recent.get(key)
            if found is not None:
                self._recent.move_to_end(key)
                return found
            if self._file is None:
                return None
            with self._transaction() as file:
                row = file.execute(f"SELECT passages, used FROM replies {_WHERE}", key).fetchone()
                if row is None:
                    return None
                if time.time() - row[1] > _USE_S:
                    file.execute(f"UPDATE replies SET used = ? {_WHERE}", (time.time(), *key))
            found = [Passage(*fields) for fields in json.loads(row[0])]
            self._keep(key, found)
            return found

    def put(self, items: Iterable[tuple[Key, Sequence[Passage]]]) -> None:
        """Keep replies. Raises OSError if the file cannot be written, because the disk is full or gone."""
        items = list(items)
        with self._lock:
            for key, passages in items:
                self._keep(key, list(passages))
            if self._file is None:
                return
            now = time.time()
            rows = [
                (*key, json.dumps([[p.id, p.title, p.text] for p in passages], ensure_ascii=False), now)
                for key, passages in items
            ]
            with self._transaction() as file:
                file.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", rows)
                while _bytes(file) > self._max_bytes:
                    count = file.execute("SELECT COUNT(*) FROM replies").fetchone()[0]
                    if file.execute(_DROP, (count // 10 + 1,)).rowcount == 0:
                        break  # even an empty file is larger

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        assert self._file is not None
        try:
            with self._file:
                yield self._file
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error

    def _keep(self, key: Key, passages: list[Passage]) -> None:
        self._recent[key] = passages
        self._recent.move_to_end(key)
        if len(self._recent) > self._size:
            self._recent.popitem(last=False)


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        file.execute("PRAGMA page_size = 8192")  # for a new file; a reply has about 2 kB
        file.execute("PRAGMA journal_mode = WAL")  # readers and one writer at a time
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute(_SCHEMA)
        file.execute(_INDEX)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: replies cannot be kept there ({error}); give another file") from error
    return file


def _bytes(file: sqlite3.Connection) -> int:
    """Bytes used in the file, without free pages, which will be filled again."""
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return (pages - free) * size
