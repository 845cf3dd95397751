"""BM25 search and the corpora under it."""

from __future__ import annotations

import gzip
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.folders import cache_folder
from sorl_env.task import ToolSettings
from sorl_env.tool import ToolReply
from sorl_tools.corpus import Passage, format_passages, read_corpus
from sorl_tools.search.bm25_search import BM25Search, HttpSearch, search_tool

from ..corpora import write_jsonl, write_passages

PASSAGES = [
    Passage("0", "Bizet", "The composer Georges Bizet was born in Paris."),
    Passage("1", "Mozart", "The composer Mozart was born in Salzburg."),
    Passage("2", "Salzburg", "A city on the Salzach. Its river is green."),
    Passage("3", "Mozart", "The composer Mozart was born in Salzburg."),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))


def test_passage_from_search_r1_row() -> None:
    assert Passage.from_row({"id": 7, "contents": '"A "B" C"\nfirst\nsecond'}) == Passage(
        "7", 'A "B" C', "first second"
    )
    assert Passage.from_row({"contents": "no title"}) == Passage("", "", "no title")
    assert Passage.from_row({"contents": '""Heroes" (an album)"\nx'}).title == '"Heroes" (an album)'
    assert Passage.from_row({"id": None, "text": "a", "title": None}) == Passage("", "", "a")


def test_format() -> None:
    reply = format_passages([PASSAGES[0], Passage("9", "", "Untitled text.")])
    assert reply == ToolReply(
        "Doc 1 (Bizet): The composer Georges Bizet was born in Paris.\nDoc 2: Untitled text.", hits=2
    )
    assert format_passages([]) == ToolReply("No passages found.", hits=0)


def test_ranking_stems_and_breaks_ties_in_corpus_order() -> None:
    search = BM25Search(PASSAGES, top_k=2)
    assert [p.id for p, _ in search.retrieve("the rivers")] == ["2"]  # "river", and no stop words
    found = search.retrieve("composers born in Salzburg")
    assert [p.id for p, _ in found] == ["1", "3"]
    assert found[0][1] == found[1][1] > 0
    assert [p.id for p, _ in search.retrieve("composers born in Salzburg", top_k=4)] == ["1", "3", "0", "2"]
    assert len(search.retrieve("composer", top_k=100)) == 3


@pytest.mark.parametrize("query", ["", "   ", "the of and", "xylophone", "?!", "a", "\ud800"])
def test_no_match_is_an_answer(query: str) -> None:
    assert BM25Search(PASSAGES)(query) == ToolReply("No passages found.", hits=0)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_from_file_is_the_same_search(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / name, PASSAGES)
    first, again = BM25Search.from_file(path, top_k=2), BM25Search.from_file(str(path), top_k=1)
    memory = BM25Search(PASSAGES, top_k=2)
    for query in ("Mozart", "green river", "composers born in Paris", "nothing"):
        assert first(query) == memory(query)
        assert again.retrieve(query) == memory.retrieve(query)[:1]
    assert first.fingerprint == again.fingerprint != memory.fingerprint


def test_index_is_built_once_per_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)
    BM25Search.from_file(path)
    indexes = list((cache_folder() / "bm25").iterdir())
    assert len(indexes) == 1
    BM25Search.from_file(write_jsonl(tmp_path / "copy.jsonl", PASSAGES))
    assert list((cache_folder() / "bm25").iterdir()) == indexes
    changed = BM25Search.from_file(
        write_jsonl(path, [*PASSAGES, Passage("4", "Chopin", "Born near Warsaw.")])
    )
    assert len(list((cache_folder() / "bm25").iterdir())) == 2
    assert changed("Warsaw").hits == 1


def test_builders_that_race_share_the_result(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)
    with ThreadPoolExecutor(4) as pool:
        searches = list(pool.map(lambda _: BM25Search.from_file(path), range(4)))
    assert [search("river").hits for search in searches] == [1] * 4
    assert len(list((cache_folder() / "bm25").iterdir())) == 1


def test_a_corpus_that_cannot_be_read_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(b'{"id": "0", "contents": "x"}\n{"id": "1"}\n')
    with pytest.raises(UserError, match=r"corpus.jsonl:2: not a passage"):
        BM25Search.from_file(tmp_path / "corpus.jsonl")
    assert list(cache_folder().rglob("*")) == []  # not even an empty folder


def test_a_gzip_file_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    whole = gzip.compress(b'{"id": "0", "contents": "x"}\n' * 1000)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a readable gzip file"):
        BM25Search.from_file(path)


def test_missing_corpus_and_wrong_kind(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "wiki.jsonl", PASSAGES)
    with pytest.raises(UserError, match=r"wik.jsonl: no such corpus. Did you mean 'wiki.jsonl'\?"):
        BM25Search.from_file(tmp_path / "wik.jsonl")
    (tmp_path / "wiki.png").touch()
    with pytest.raises(
        UserError, match=r"wiki.png: cannot read this kind of corpus; use .jsonl or .jsonl.gz"
    ):
        BM25Search.from_file(tmp_path / "wiki.png")
    for nothing in ([], [Passage("0", "", "")], [Passage("0", "x", "of the")]):
        with pytest.raises(UserError, match="nothing to search"):
            BM25Search(nothing)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)
    monkeypatch.setenv("SORL_CACHE", str(file))
    with pytest.raises(UserError, match="set SORL_CACHE"):
        BM25Search.from_file(file)


def test_passage_file_is_a_sequence(tmp_path: Path) -> None:
    stored = write_passages(PASSAGES, tmp_path)
    assert len(stored) == 4
    assert list(stored) == PASSAGES
    assert stored[-1] == PASSAGES[-1]
    assert stored[1:3] == PASSAGES[1:3]
    with pytest.raises(IndexError):
        stored[4]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SORL_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sorl"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "sorl"


def test_search_tool_of_settings(tmp_path: Path) -> None:
    sample = write_jsonl(tmp_path / "sample.jsonl", PASSAGES[:1])
    corpus = write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)
    over_sample = search_tool(ToolSettings(), sample)
    assert isinstance(over_sample, BM25Search)
    assert over_sample("composer").hits == 1
    over_corpus = search_tool(ToolSettings(corpus=str(corpus), top_k=2), sample)
    assert over_corpus("composer").hits == 2
    server = search_tool(ToolSettings(search_url="http://127.0.0.1:8000"), sample)
    assert isinstance(server, HttpSearch)
    assert server.url == "http://127.0.0.1:8000/retrieve"
    server.close()
    with pytest.raises(UserError, match="give one of them"):
        search_tool(ToolSettings(corpus=str(corpus), search_url="http://127.0.0.1:8000"), sample)


def test_replies_of_servers_are_kept_where_the_settings_say(tmp_path: Path) -> None:
    in_memory = search_tool(ToolSettings(search_url="http://127.0.0.1:8000"), tmp_path)
    path = tmp_path / "new" / "replies.db"
    on_disk = search_tool(ToolSettings(search_url="http://127.0.0.1:8000", cache=str(path)), tmp_path)
    assert isinstance(in_memory, HttpSearch) and isinstance(on_disk, HttpSearch)
    key = ("sha256:1", 3, "who?")
    for tool in (in_memory, on_disk):
        assert tool.cache is not None
        tool.cache.put(key, [])
        assert tool.cache.get(key) == []
        tool.close()
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    with pytest.raises(UserError, match="is for replies of servers: give search_url"):
        search_tool(ToolSettings(corpus=str(path), cache=str(path)), tmp_path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "0", "contents": None}, "'contents' is null, not a text"),
        ({"id": "0", "contents": ["a"]}, "'contents' is ['a'], not a text"),
        ({"id": "0", "text": None}, "'text' is null, not a text"),
        ({"id": "0", "text": "a", "title": 5}, "'title' is 5, not a text"),
        ({"id": ["0"], "contents": "a"}, "'id' is ['0'], which is neither a text nor a whole number"),
        ({"id": True, "contents": "a"}, "'id' is True"),
    ],
)
def test_what_is_no_text_is_refused_with_its_row(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": "first", "contents": "x"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"corpus.jsonl:2: not a passage: .*{re.escape(said)}"):
        list(read_corpus(path))
