"""The cache of retrieval replies."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.search import http_cache
from sorl_tools.search.http_cache import ReplyCache

A = [Passage("0", "Bizet", "né à Paris"), Passage("1", "", 'no "title"')]


def key(query: str, fingerprint: str = "sha256:1", top_k: int = 3) -> tuple[str, int, str]:
    return fingerprint, top_k, query


def test_the_least_recently_used_goes_first() -> None:
    cache = ReplyCache(size=2)
    cache.put([(key("a"), A), (key("b"), [])])
    assert cache.get(key("a")) == A
    cache.put([(key("c"), A[:1])])
    assert cache.get(key("b")) is None
    assert cache.get(key("a")) == A and cache.get(key("c")) == A[:1]


def test_a_key_is_index_and_top_k_and_query() -> None:
    cache = ReplyCache()
    cache.put([(key("a"), A)])
    assert cache.get(key("a", fingerprint="sha256:2")) is None
    assert cache.get(key("a", top_k=4)) is None
    assert cache.get(key("A")) is None


def test_a_file_outlives_memory_and_process(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "replies.db"
    first = ReplyCache(size=1, path=path)
    first.put([(key(str(i)), A) for i in range(10)] + [(key("none"), [])])
    assert first.get(key("0")) == A  # from the file, memory holds one
    second = ReplyCache(path=path)
    assert second.get(key("9")) == A and second.get(key("none")) == []
    second.put([(key("0"), A[:1])])
    second.close()
    first.close()
    third = ReplyCache(path=path)
    assert third.get(key("0")) == A[:1]
    third.close()


def test_threads_and_writers_share_a_file(tmp_path: Path) -> None:
    caches = [ReplyCache(size=8, path=tmp_path / "replies.db") for _ in range(2)]

    def work(number: int) -> bool:
        cache = caches[number % 2]
        cache.put([(key(str(number % 50)), [Passage(str(number % 50), "", "x")])])
        found = cache.get(key(str(number % 50)))
        return found == [Passage(str(number % 50), "", "x")]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(400)))
    for cache in caches:
        cache.close()


def test_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database, but long enough to look at " * 100)
    for path in (tmp_path / "notes.txt", tmp_path, tmp_path / "notes.txt" / "replies.db"):
        with pytest.raises(UserError, match="replies cannot be kept there"):
            ReplyCache(path=path)
    with pytest.raises(UserError, match="keep at least 1"):
        ReplyCache(size=0)
    with pytest.raises(UserError, match="max_file_mb=0: give more than 0"):
        ReplyCache(max_file_mb=0)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE replies (name TEXT)")
    other.close()
    with pytest.raises(UserError, match=r"other.db: replies cannot be kept there .*used"):
        ReplyCache(path=tmp_path / "other.db")


def test_a_file_that_is_full_gives_up_what_was_used_least_recently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0  # a use is noted once an hour: after every 36th reply here
    monkeypatch.setattr(http_cache.time, "time", lambda: now)
    path = tmp_path / "replies.db"
    cache = ReplyCache(size=1, path=path, max_file_mb=0.5)
    passage = [Passage("0", "", "x" * 2000)]  # 0.5 MB hold some 200 of them
    for number in range(1000):
        now = 100.0 * number
        cache.put([(key(f"q{number:04}"), passage)])
        if number % 50 == 0:
            assert cache.get(key("q0000")) == passage
    kept = [number for number in range(1000) if cache.get(key(f"q{number:04}")) is not None]
    assert kept[0] == 0 and kept[1:] == list(range(1000 - len(kept) + 1, 1000))
    assert 100 < len(kept) < 250
    cache.close()
    assert path.stat().st_size < 700_000
    roomy = ReplyCache(path=path)
    assert roomy.get(key("q0999")) == passage
    roomy.close()
