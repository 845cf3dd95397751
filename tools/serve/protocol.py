r"""The server's side of the ``/retrieve`` protocol and its dialects: check requests against limits, and encode replies.

A request is ``{"queries": [str, ..], "topk": int | null, "return_scores": bool}``, as Search-R1, slime and torchtitan
send it, or has ``"query": str`` in place of ``queries``, as SkyRL and GEM send it. Other fields are ignored. A reply is
``{"result": [hits of the first query, hits of the second, ..]}``, where a hit is ``{"document": {"id": str, "contents":
"\"Title\"\ntext"}, "score": float}``, or only the document if no scores were asked for. As in the public server, no
queries get no results, and a ``topk`` of null or 0 means the server's default.

A request in MessagePack gets its reply in MessagePack, as from GEM's server: every hit has ``document`` and ``score``
(null if no scores were asked for), and the ``result`` of a single ``query`` is its hits, without the list around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sorl_tools.corpus import Passage
from sorl_tools.http_server.app import RequestError
from sorl_tools.index import Hit


@dataclass(frozen=True)
class RequestLimits:
    """Limits on one request."""

    max_queries: int = 512
    max_query_chars: int = 4096
    max_top_k: int = 100  # passages for each query
    default_top_k: int = 3  # of a request that names no number


@dataclass(frozen=True)
class RetrieveRequest:
    """A request within the limits."""

    queries: tuple[str, ...]
    top_k: int
    return_scores: bool = False
    is_single: bool = False  # it had ``query`` in place of ``queries``
    is_msgpack: bool = False  # and so is its reply; else JSON

    @property
    def content_type(self) -> str:
        """The media type of the reply."""
        return "application/msgpack" if self.is_msgpack else "application/json"


class _Body(msgspec.Struct):
    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = None
    return_scores: bool = False


# by is_msgpack
_DECODERS: dict[bool, Any] = {False: msgspec.json.Decoder(_Body), True: msgspec.msgpack.Decoder(_Body)}
_ENCODERS: dict[bool, Any] = {False: msgspec.json.Encoder(), True: msgspec.msgpack.Encoder()}
_EXAMPLE = 'send {"queries": ["..."], "topk": 3}'


def parse_request(body: bytes, limits: RequestLimits) -> RetrieveRequest:
    """The request in a body. The first byte tells MessagePack from JSON, because GEM's client sends no content type: a
    map of MessagePack begins with a byte from 0x80 on, and JSON with white space or a brace. Raises RequestError: 400
    if it is neither, 422 if it is not a request or asks for too much."""
    is_msgpack = body[:1] >= b"\x80"
    try:
        said: _Body = _DECODERS[is_msgpack].decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(422, f"{error}; {_EXAMPLE}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        kind = "MessagePack" if is_msgpack else "JSON"
        raise RequestError(400, f"the body is not {kind}: {error}") from error
    if (said.queries is None) == (said.query is None):
        have = "neither" if said.query is None else "both"
        raise RequestError(422, f"the request has {have} of `queries` and `query`; {_EXAMPLE}")
    is_single = said.query is not None
    queries = [said.query] if said.query is not None else (said.queries or [])
    check_queries(queries, limits, "query" if is_single else "queries")
    top_k = checked_top_k(said.topk, limits)
    return RetrieveRequest(tuple(queries), top_k, said.return_scores, is_single, is_msgpack)


def check_queries(queries: Sequence[str], limits: RequestLimits, name: str) -> None:
    """Raise RequestError(422) if there are too many queries, or one is too long. ``name`` is the field they are in."""
    if len(queries) > limits.max_queries:
        raise RequestError(422, f"{len(queries)} queries, at most {limits.max_queries}: split the request")
    for index, query in enumerate(queries):
        if len(query) > limits.max_query_chars:
            where = name if name == "query" else f"{name}[{index}]"
            raise RequestError(422, f"{where} exceeds {limits.max_query_chars} characters")


def checked_top_k(asked: int | None, limits: RequestLimits) -> int:
    """The number of passages for each query. Raises RequestError(422) if it is out of the limits."""
    top_k = asked or limits.default_top_k
    if not 1 <= top_k <= limits.max_top_k:
        raise RequestError(422, f"topk={top_k}: give 1 to {limits.max_top_k}; 0 is {limits.default_top_k}")
    return top_k


def encode_result(results: Sequence[Sequence[Hit]], request: RetrieveRequest) -> bytes:
    """The body of the reply to ``request``, in its dialect."""
    rows = [[_row(hit, request) for hit in hits] for hits in results]
    bare = request.is_msgpack and request.is_single
    body: bytes = _ENCODERS[request.is_msgpack].encode({"result": rows[0] if bare else rows})
    return body


def _row(hit: Hit, request: RetrieveRequest) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": contents_of(hit.passage)}
    if request.return_scores or request.is_msgpack:
        return {"document": document, "score": hit.score if request.return_scores else None}
    return document


def contents_of(passage: Passage) -> str:
    r"""Title and text as one string, ``"Title"\ntext``, which ``Passage.from_row`` reads."""
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
