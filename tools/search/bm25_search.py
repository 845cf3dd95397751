r"""The search tool: BM25 over a corpus in process, or a retrieval server that speaks Search-R1's protocol.

Corpora are JSONL in Search-R1's schema, ``{"id": "0", "contents": "\"Title\"\ntext"}``. Both tools return passages as
lines ``Doc 1 (Title): text``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from sorl_env.errors import UserError
from sorl_env.task import ToolSettings
from sorl_env.tool import ToolReply
from sorl_tools.corpus import Passage, format_passages, read_corpus
from sorl_tools.index.build.build import open_bm25
from sorl_tools.index.words import Bm25, index_words
from sorl_tools.search.http import DESCRIPTION, SCHEMA, HttpSearch, ReplyCache, check_query


def search_tool(settings: ToolSettings, sample: Path) -> BM25Search | HttpSearch:
    """The search tool that the settings ask for, over the task's embedded ``sample`` if they name nothing to search.
    Raises ``UserError`` if both a corpus and a server are named, the one that is named cannot be used, or there is a
    cache file but no server."""
    if settings.corpus is not None and settings.search_url is not None:
        raise UserError(f"corpus={settings.corpus} and search_url={settings.search_url}: give one of them")
    if settings.search_url is not None:
        cache = ReplyCache(path=settings.cache)
        return HttpSearch(settings.search_url, settings.top_k, settings.timeout_s, cache=cache)
    if settings.cache is not None:
        raise UserError(f"cache={settings.cache} is for replies of servers: give search_url, or leave it out")
    if settings.corpus is not None:
        return BM25Search.from_file(settings.corpus, settings.top_k)
    return BM25Search(list(read_corpus(sample)), settings.top_k, is_sample=True)


class BM25Search:
    """BM25 (Lucene's, k1 = 1.5, b = 0.75) with English stemming and stop words, on one core. numpy adds the scores, and
    the best passages are taken by repeated argmax: a query takes 0.1 ms on 44,000 passages, tokenization included. The
    compiled search of ``sorl-serve`` is several times as fast, but takes a second to start. A search returns at most
    ``top_k`` passages; one that shares no word with the query is never among them. ``words`` is the BM25 index of the
    passages; None builds it now. ``fingerprint`` identifies the corpus in a run's manifest; None takes a hash of the
    passages. With ``is_sample`` they are a task's embedded sample; the environment warns if the questions are real.
    Raises ``UserError`` if no passage has a word in it."""

    name = "search"
    description = DESCRIPTION
    schema = SCHEMA
    inline = True

    def __init__(
        self,
        passages: Sequence[Passage],
        top_k: int = 3,
        *,
        words: Bm25 | None = None,
        fingerprint: str | None = None,
        is_sample: bool = False,
    ) -> None:
        self.top_k = top_k
        self.is_sample = is_sample
        self._passages = passages
        self._words = words or Bm25(index_words(passages))
        if fingerprint is None:
            texts = "".join(f"{one.id}\0{one.title}\0{one.text}\0" for one in passages)
            fingerprint = f"sha256:{hashlib.sha256(texts.encode()).hexdigest()}"
        self.fingerprint = fingerprint

    @classmethod
    def from_file(cls, path: str | Path, top_k: int = 3) -> BM25Search:
        """Search a ``.jsonl`` or ``.jsonl.gz`` corpus. The index is built once for each content of the file and kept in
        the cache folder (see ``cache_folder``). It is memory-mapped from there, so that several processes share one
        copy. Raises ``UserError`` if the file cannot be read, or the cache folder cannot be written."""
        index, digest = open_bm25(Path(path).expanduser())
        return cls(index.passages, top_k, words=index.words, fingerprint=digest)

    def retrieve(self, query: str, top_k: int | None = None) -> list[tuple[Passage, float]]:
        """The best passages and their scores, best first; equal scores keep the order of the corpus."""
        found = self._words.best(query, self.top_k if top_k is None else top_k)
        return [(self._passages[place], score) for place, score in found]

    def __call__(self, query: str) -> ToolReply:
        """Search once. Raises ``ToolInputError`` for a query that is longer than servers accept."""
        return format_passages([passage for passage, _ in self.retrieve(check_query(query))])
