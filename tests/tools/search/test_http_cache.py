"""The cache of retrieval replies."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.search.http import ReplyCache

A = [Passage("0", "Bizet", "né à Paris"), Passage("1", "", 'no "title"')]


def key(query: str, fingerprint: str = "sha256:1", top_k: int = 3) -> tuple[str, int, str]:
    return fingerprint, top_k, query


def test_a_key_is_index_and_top_k_and_query() -> None:
    cache = ReplyCache()
    cache.put(key("a"), A)
    assert cache.get(key("a")) == A
    assert cache.get(key("a", fingerprint="sha256:2")) is None
    assert cache.get(key("a", top_k=4)) is None
    assert cache.get(key("A")) is None


def test_a_file_outlives_its_process_and_gives_up_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "replies.db"
    first = ReplyCache(path, max_replies=10)
    for number in range(9):
        first.put(key(str(number)), A)
    first.put(key("none"), [])
    second = ReplyCache(path)
    assert second.get(key("0")) == A and second.get(key("none")) == []
    second.put(key("1"), A[:1])
    second.close()
    first.put(key("new"), A)
    assert [number for number in range(9) if first.get(key(str(number))) is None] == [0]
    assert first.get(key("1")) == A[:1]
    first._file.execute("UPDATE replies SET passages = substr(passages, 1, 9)")
    assert first.get(key("1")) is None  # damaged, so the server is asked again
    first.close()


def test_threads_and_writers_share_a_file(tmp_path: Path) -> None:
    caches = [ReplyCache(tmp_path / "replies.db") for _ in range(2)]

    def work(number: int) -> bool:
        cache = caches[number % 2]
        cache.put(key(str(number % 50)), [Passage(str(number % 50), "", "x")])
        return cache.get(key(str(number % 50))) == [Passage(str(number % 50), "", "x")]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(200)))
    for cache in caches:
        cache.close()


def test_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database, but long enough to look at " * 100)
    for path in (tmp_path / "notes.txt", tmp_path, tmp_path / "notes.txt" / "replies.db"):
        with pytest.raises(UserError, match="replies cannot be kept there"):
            ReplyCache(path)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE replies (name TEXT)")
    other.close()
    with pytest.raises(UserError, match=r"other.db: replies cannot be kept there .*no such column"):
        ReplyCache(tmp_path / "other.db")


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "replies.db")
    cache._file.execute("PRAGMA max_page_count = 10")
    with pytest.raises(OSError, match=r"replies\.db: database or disk is full"):
        cache.put(key("a"), [Passage("0", "", "x" * 200_000)])
    assert cache.get(key("a")) is None
    cache.close()
