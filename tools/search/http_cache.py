"""A cache of retrieval replies in SQLite: in a file that later runs and other processes share, or in memory."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage

Key = tuple[str, int, str]  # fingerprint of the index, top_k, query

KEPT_IN_MEMORY = 4096
KEPT_IN_FILE = 350_000  # searches of three passages of 100 words: about a gigabyte


class ReplyCache:
    """Passages by index, ``top_k`` and query. Threads, and processes of one machine, may share it.

    Args:
        path: SQLite file that keeps replies between processes, on a local disk (its journal does not work over a
            network); None keeps them in memory.
        max_replies: beyond this number the oldest replies are deleted; None keeps 4,096 in memory, 350,000 in a file.

    Raises:
        UserError: the file cannot be used.
        OSError: by ``get`` and ``put``: the file cannot be read or written, because the disk is full or gone.
    """

    def __init__(self, path: str | Path | None = None, max_replies: int | None = None) -> None:
        self._max_replies = max_replies or (KEPT_IN_MEMORY if path is None else KEPT_IN_FILE)
        self._path = ":memory:" if path is None else Path(path).expanduser()
        self._lock = threading.Lock()
        try:
            if isinstance(self._path, Path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._path, timeout=30.0, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = WAL")  # readers and one writer at a time
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS replies (fingerprint TEXT, top_k INTEGER, query TEXT, passages TEXT, "
                "PRIMARY KEY (fingerprint, top_k, query))"
            )
            self.get(("", 0, ""))  # the table may be another program's
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"{path}: replies cannot be kept there ({error}); give another file") from error

    def get(self, key: Key) -> list[Passage] | None:
        """The passages, or None; what is damaged counts as not there."""
        query = "SELECT passages FROM replies WHERE fingerprint = ? AND top_k = ? AND query = ?"
        with self._open() as file:
            row = file.execute(query, key).fetchone()
        try:
            return None if row is None else [Passage(*fields) for fields in json.loads(row[0])]
        except (ValueError, TypeError):
            return None

    def put(self, key: Key, passages: Sequence[Passage]) -> None:
        """Keep a reply."""
        text = json.dumps([[p.id, p.title, p.text] for p in passages], ensure_ascii=False)
        with self._open() as file:
            file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", (*key, text))
            # row ids count up, so these are the oldest
            file.execute("DELETE FROM replies WHERE rowid <= last_insert_rowid() - ?", (self._max_replies,))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The file for one thread at a time, in a transaction."""
        try:
            with self._lock, self._file as file:
                yield file
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error
