"""BM25 from compact arrays and by compiled code against bm25s, which builds and searches in its own ways."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index import open_index, words
from sorl_tools.index.build import bm25 as bm25_build
from sorl_tools.index.build.build import build
from sorl_tools.index.words import Bm25, index_words, open_words, tokenize

from ..corpora import made_up, write_jsonl

PASSAGES = [
    Passage("0", "", "river river delta"),
    Passage("1", "", "delta"),
    Passage("2", "", "mountain the of"),
    Passage("3", "", ""),
]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def by_bm25s(texts: Sequence[str]) -> list[list[str]]:
    stemmer = Stemmer.Stemmer("english")
    return bm25s.tokenize(list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


def test_scores_by_hand(tmp_path: Path) -> None:
    build([write_jsonl(tmp_path / "c.jsonl", PASSAGES)], tmp_path / "index")
    index = open_index(tmp_path / "index")
    # 4 passages of 3, 1, 1 and 0 words: 1.25 on average. "delta" is in 2 of them.
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    by_length = {length: idf * 1 / (1 + 1.5 * (0.25 + 0.75 * length / 1.25)) for length in (1, 3)}
    hits = index.search(["the Delta"], top_k=3)[0]
    assert [hit.passage.id for hit in hits] == ["1", "0"]
    assert [hit.score for hit in hits] == [pytest.approx(by_length[1]), pytest.approx(by_length[3])]
    twice = math.log(1 + (4 - 1 + 0.5) / 1.5) * 2 / (2 + 1.5 * (0.25 + 0.75 * 3 / 1.25))
    assert index.search(["rivers"], top_k=1)[0][0].score == pytest.approx(twice)
    assert index.search(["", "of the", "xylophone", "\ud800"], top_k=3) == [[], [], [], []]
    assert index.search([], top_k=3) == []
    with pytest.raises(UserError, match="top_k=0"):
        index.search(["delta"], top_k=0)
    index.close()


def test_words_are_those_of_bm25s(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "The cities' don't Ünïversities' running, 3D x 42 naïve_word İstanbul ß",
        "",
        "runs ran RUNNERS a",
    ]
    assert [tokenize(text) for text in texts] == by_bm25s(texts)
    ids = bm25_build.WordIds()
    encoded = [ids.encode(text).tolist() for text in texts]
    stems = list(ids.stems)
    assert [[stems[number] for number in one] for one in encoded] == by_bm25s(texts)
    ids.clear()  # of spellings
    assert [ids.encode(text).tolist() for text in texts] == encoded and list(ids.stems) == stems


def test_lists_are_those_of_bm25s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bm25_build, "CHUNK", 64)
    monkeypatch.setattr("sorl_tools.index.build.build.CHUNK", 64)
    monkeypatch.setattr(bm25_build, "MAX_SPELLINGS", 500)
    passages = made_up(1000)
    build([write_jsonl(tmp_path / "c.jsonl", passages)], tmp_path / "index")
    ours, theirs = open_words(tmp_path / "index" / "bm25", 1000), index_words(passages)
    assert ours.vocab_dict.keys() == theirs.vocab_dict.keys() - {""}  # it adds an empty word
    for stem, number in ours.vocab_dict.items():
        mine = slice(*ours.scores["indptr"][number : number + 2])
        their = slice(*theirs.scores["indptr"][theirs.vocab_dict[stem] :][:2])
        np.testing.assert_array_equal(ours.scores["indices"][mine], theirs.scores["indices"][their])
        np.testing.assert_allclose(ours.scores["data"][mine], theirs.scores["data"][their], rtol=2e-7)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_best_are_those_of_a_full_scan(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With duplicates in the corpus, so that ties are many; rare and common words, repeated ones, any top_k."""
    if compiled:
        pytest.importorskip("numba", reason="needs the search extra: pip install -e '.[search]'")
    else:
        monkeypatch.setattr(words, "_compiled", lambda: None)
    passages = [*made_up(700), *made_up(300), *made_up(200, seed=1)]
    index = index_words(passages)
    queries = [" ".join(p.text.split()[:n]) for n in (1, 2, 5, 12, 40) for p in passages[: 20 * n : n]]
    queries += ["aaword0 aaword0 beword1 bogus", ""]
    search = Bm25(index)
    assert search.top([], 3) == []
    for top_k in (1, 3, 2000):
        for query, hits in zip(queries, search.top(queries, top_k), strict=True):
            scores = index.get_scores_from_ids(index.get_tokens_ids(tokenize(query)))
            best = [place for place in np.lexsort((np.arange(1200), -scores)) if scores[place] > 0][:top_k]
            assert hits == [(place, scores[place]) for place in best] == search.best(query, top_k)


def test_threads_share_an_index(tmp_path: Path) -> None:
    passages = made_up(500)
    build([write_jsonl(tmp_path / "c.jsonl", passages)], tmp_path / "index")
    index = open_index(tmp_path / "index")
    queries = [[p.text for p in passages[i : i + 10]] for i in range(0, 200, 10)]
    alone = [index.search(batch, 5) for batch in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda batch: index.search(batch, 5), queries)) == alone
    index.close()


def test_parameters_change_scores(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", PASSAGES)
    manifest = build([corpus], tmp_path / "index", k1=0.9, b=0.4)
    assert manifest.parameters["bm25"]["k1"] == 0.9
    index = bm25s.BM25(k1=0.9, b=0.4)
    index.index(by_bm25s([f"\n{p.text}" for p in PASSAGES]), show_progress=False)
    scores = index.get_scores(["delta"])
    ours = open_index(tmp_path / "index").search(["delta"], 3)[0]
    assert {int(hit.passage.id): hit.score for hit in ours} == {
        place: pytest.approx(score) for place, score in enumerate(scores.tolist()) if score
    }
