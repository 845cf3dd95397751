"""Search tools: BM25 in this process, or a client of retrieval servers."""

from sorl_tools.search.bm25_search import BM25Search, search_tool
from sorl_tools.search.http import HttpSearch, ReplyCache

__all__ = ["BM25Search", "HttpSearch", "ReplyCache", "search_tool"]
