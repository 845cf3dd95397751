"""BM25 built outside of memory against bm25s, which builds in it."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index import cached as bm25_index
from sorl_tools.index import open_index, postings
from sorl_tools.index.build import bm25 as bm25_build
from sorl_tools.index.build.build import build
from sorl_tools.index.build.options import Bm25Options
from sorl_tools.index.postings import Postings
from sorl_tools.index.words import STOP_WORD, Vocabulary, WordIds, query_stems
from sorl_tools.search.bm25_search import BM25Search

from ..corpora import made_up, write_jsonl

PASSAGES = [
    Passage("0", "", "river river delta"),
    Passage("1", "", "delta"),
    Passage("2", "", "mountain the of"),
    Passage("3", "", ""),
]


def tokenize(texts: Sequence[str]) -> list[list[str]]:
    """By bm25s alone."""
    stemmer = Stemmer.Stemmer("english")
    return bm25s.tokenize(list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


def reference(passages: Sequence[Passage]) -> bm25s.BM25:
    index = bm25s.BM25()
    words = tokenize([f"{p.title}\n{p.text}" for p in passages])
    index.index(words, show_progress=False)
    return index


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and many blocks, from few passages."""
    monkeypatch.setattr(bm25_build, "CHUNK", 64)
    monkeypatch.setattr("sorl_tools.index.build.build.CHUNK", 64)
    monkeypatch.setattr(bm25_build, "BLOCK", 500)


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


@pytest.mark.usefixtures("small_chunks")
def test_lists_are_those_of_bm25s(tmp_path: Path) -> None:
    passages = made_up(1000)
    build([write_jsonl(tmp_path / "c.jsonl", passages)], tmp_path / "index")
    ours, theirs = Postings(tmp_path / "index" / "bm25", 1000), reference(passages)
    assert len(ours.vocabulary) == len(theirs.vocab_dict) - 1  # it adds an empty word
    for stem, number in theirs.vocab_dict.items():
        if stem:
            mine = slice(*ours.indptr[(at := ours.get_tokens_ids([stem])[0]) : at + 2])
            their = slice(*theirs.scores["indptr"][number : number + 2])
            np.testing.assert_array_equal(ours.indices[mine], theirs.scores["indices"][their])
            np.testing.assert_allclose(ours.data[mine], theirs.scores["data"][their], rtol=2e-7)
    loaded = bm25s.BM25()
    loaded.load_scores(tmp_path / "index" / "bm25", num_docs=1000, mmap=True)  # its own file names and layout
    np.testing.assert_array_equal(loaded.scores["data"], ours.data)


@pytest.mark.parametrize("plain", [0, 1 << 19])
def test_the_best_are_those_of_a_full_scan(
    tmp_path: Path, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With duplicates in the corpus, so that ties are many; rare and common words, repeated ones, any top_k."""
    monkeypatch.setattr(postings, "PLAIN", plain)
    monkeypatch.setattr(postings, "LOOKUP_COST", 1)
    passages = [*made_up(700), *made_up(300), *made_up(500, seed=1)]
    build([write_jsonl(tmp_path / "c.jsonl", passages)], tmp_path / "index")
    index = Postings(tmp_path / "index" / "bm25", 1500)
    queries = [" ".join(p.text.split()[:n]) for n in (1, 2, 5, 12, 40) for p in passages[: 40 * n : n]]
    for query in [*queries, "aaword0 aaword0 beword1 bogus", ""]:
        words = index.get_tokens_ids(query_stems(query))
        scores = index.get_scores_from_ids(words)
        for top_k in (1, 3, 10, 2000):
            places, values = index.best(words, top_k)
            wanted = [place for place in np.lexsort((np.arange(1500), -scores)) if scores[place] > 0][:top_k]
            assert places.tolist() == wanted
            np.testing.assert_array_equal(values, scores[wanted])


def test_threads_share_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postings, "PLAIN", 0)
    passages = made_up(2000)
    build([write_jsonl(tmp_path / "c.jsonl", passages)], tmp_path / "index")
    index = open_index(tmp_path / "index")
    queries = [[p.text for p in passages[i : i + 10]] for i in range(0, 400, 10)]
    alone = [index.search(batch, 5) for batch in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda batch: index.search(batch, 5), queries)) == alone
    index.close()


def test_words_are_those_of_bm25s() -> None:
    texts = [
        "The cities' don't Ünïversities' running, 3D x 42 naïve_word İstanbul ß",
        "",
        "runs ran RUNNERS a",
    ]
    ids = WordIds()
    encoded = [ids.encode(text) for text in texts]
    stems = ids.take_new()
    assert [[stems[number] for number in one] for one in encoded] == tokenize(texts)
    assert bm25_index.tokenize(texts) == tokenize(texts)
    assert ids["the"] == STOP_WORD
    assert ids.take_new() == []
    again = WordIds(stems)
    assert [again.encode(text).tolist() for text in texts] == [one.tolist() for one in encoded]


def test_vocabulary_finds_every_stem_and_no_other(tmp_path: Path) -> None:
    stems = ["zebra", "ab", "éa", "abc", "z"]
    Vocabulary.write(stems, tmp_path)
    vocabulary = Vocabulary(tmp_path)
    assert [vocabulary.id(stem) for stem in stems] == [0, 1, 2, 3, 4]
    assert [vocabulary.id(stem) for stem in ("", "a", "abcd", "zz", "é", "\ud800")] == [None] * 6


def test_parameters_change_scores_and_are_checked(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", PASSAGES)
    manifest = build([corpus], tmp_path / "index", bm25=Bm25Options(k1=0.9, b=0.4))
    assert manifest.parameters["bm25"]["k1"] == 0.9
    index = bm25s.BM25(k1=0.9, b=0.4)
    index.index(tokenize([f"\n{p.text}" for p in PASSAGES]), show_progress=False)
    scores = index.get_scores(["delta"])
    ours = open_index(tmp_path / "index").search(["delta"], 3)[0]
    assert {int(hit.passage.id): hit.score for hit in ours} == {
        place: pytest.approx(score) for place, score in enumerate(scores.tolist()) if score
    }
    for bad in (Bm25Options(k1=-1), Bm25Options(b=1.5), Bm25Options(k1=math.nan)):
        with pytest.raises(UserError, match="k1 must be 0 or more"):
            build([corpus], tmp_path / "other", bm25=bad)


def test_the_search_in_process_opens_a_folder(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", PASSAGES)
    manifest = build([corpus], tmp_path / "index")
    search = BM25Search.from_file(tmp_path / "index", top_k=2)
    assert search.fingerprint == manifest.hash
    assert search.retrieve("the deltas") == BM25Search(PASSAGES, top_k=2).retrieve("the deltas")
    manifest_file = tmp_path / "index" / "manifest.json"
    manifest_file.write_text(manifest_file.read_text().replace('"backend": "bm25"', '"backend": "dense"'))
    with pytest.raises(UserError, match="a dense index embeds its queries: serve it with sorl-serve"):
        BM25Search.from_file(tmp_path / "index")


@pytest.mark.slow
def test_wikipedia_ranks_as_bm25s_does(shared_data: Path, tmp_path: Path) -> None:
    corpus = shared_data / "corpus" / "wiki.jsonl.gz"
    build([corpus], tmp_path / "index")
    index = open_index(tmp_path / "index")
    with gzip.open(corpus, "rt", encoding="utf-8") as lines:
        passages = [Passage.from_row(json.loads(line)) for line in lines]
    theirs = reference(passages)
    with gzip.open(shared_data / "nq" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        queries = [json.loads(line)["question"] for line in lines]
    for query, hits in zip(queries, index.search(queries, 10), strict=True):
        scores = theirs.get_scores_from_ids(theirs.get_tokens_ids(tokenize([query])[0]))
        best = np.lexsort((np.arange(len(scores)), -scores))[:10]
        assert [hit.score for hit in hits] == pytest.approx(scores[best].tolist(), rel=1e-6)
        assert [hit.passage for hit in hits] == [passages[place] for place in best]
    index.close()
