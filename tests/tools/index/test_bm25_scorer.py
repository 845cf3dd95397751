"""The compiled scorer against BM25Search, which adds up in numpy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sorl_tools.corpus import Passage
from sorl_tools.index.cached import build_index, tokenize
from sorl_tools.search.bm25_search import BM25Search

pytest.importorskip("numba", reason="needs the search extra: pip install 'sorl[search]'")

from sorl_tools.index.bm25_scorer import BatchScorer


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def passages(count: int, words: int, seed: int) -> list[Passage]:
    """Random texts over few words, so that many scores are equal."""
    rng = np.random.default_rng(seed)
    return [
        Passage(str(i), "", " ".join(f"w{n}x" for n in rng.integers(words, size=rng.integers(1, 12))))
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "words"), [(1, 2), (3, 1), (200, 5), (500, 400)])
@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_equals_the_search_in_numpy(count: int, words: int, top_k: int) -> None:
    corpus = passages(count, words, seed=count)
    index = build_index(corpus)
    search = BM25Search(corpus, index=index)
    rng = np.random.default_rng(1)
    queries = [" ".join(f"w{n}x" for n in rng.integers(words + 3, size=size)) for size in range(12)] * 3
    scorer = BatchScorer(index)
    for _ in range(2):  # what it reuses is as it was
        found = scorer.top(tokenize(queries), top_k)
        assert len(found) == len(queries)
        for query, hits in zip(queries, found, strict=True):
            assert [(corpus[doc], score) for doc, score in hits] == search.retrieve(query, top_k)


def test_no_queries_and_no_words() -> None:
    scorer = BatchScorer(build_index(passages(5, 3, seed=0)))
    assert scorer.top([], 3) == []
    assert scorer.top([[], ["unknown"], []], 3) == [[], [], []]


@pytest.mark.slow
def test_equals_the_search_in_numpy_on_wikipedia(shared_data: Path) -> None:
    search = BM25Search.from_file(shared_data / "corpus" / "wiki.jsonl.gz")
    with gzip.open(shared_data / "nq" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines][:300]
    found = BatchScorer(search._index).top(tokenize(questions), 10)
    for question, hits in zip(questions, found, strict=True):
        assert [(search._passages[doc], score) for doc, score in hits] == search.retrieve(question, 10)
