r"""The server's side of Search-R1's ``/retrieve`` protocol: check requests against limits, and encode replies.

A request is ``{"queries": [str, ..], "topk": int | null, "return_scores": bool}``. Only ``queries`` is required, and
other fields are ignored. A reply is ``{"result": [hits of the first query, hits of the second, ..]}``, where a hit is
``{"document": {"id": str, "contents": "\"Title\"\ntext"}, "score": float}``, or only the document if no scores were
asked for. As in the public server, no queries get no results, and a ``topk`` of null or 0 means the server's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sorl_tools.corpus import Passage
from sorl_tools.index import Hit


@dataclass(frozen=True)
class RequestLimits:
    """Limits on one request.

    Attributes:
        max_body_bytes: size of the request.
        max_queries: number of queries.
        max_query_chars: characters of each query.
        max_top_k: passages for each query.
        default_top_k: passages for each query of a request that names no number.
    """

    max_body_bytes: int = 1 << 20
    max_queries: int = 512
    max_query_chars: int = 4096
    max_top_k: int = 100
    default_top_k: int = 3


@dataclass(frozen=True)
class RetrieveRequest:
    """A request within the limits."""

    queries: tuple[str, ...]
    top_k: int
    return_scores: bool


class RequestError(Exception):
    """A request that is answered with ``status`` and ``{"error": message}``.

    ``retry_after_s`` is sent as Retry-After.
    """

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class _Body(msgspec.Struct):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class _Document(msgspec.Struct):
    id: str
    contents: str


class _ScoredDocument(msgspec.Struct):
    document: _Document
    score: float


_decoder = msgspec.json.Decoder(_Body)
_encoder = msgspec.json.Encoder()


def parse_request(body: bytes, limits: RequestLimits) -> RetrieveRequest:
    """The request in a body.

    Raises:
        RequestError: 400 if it is not JSON, 422 if it is not a request or asks for too much.
    """
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(422, f'{error}; send {{"queries": ["..."], "topk": 3}}') from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if len(request.queries) > limits.max_queries:
        raise RequestError(
            422, f"{len(request.queries)} queries, at most {limits.max_queries}: split the request"
        )
    for index, query in enumerate(request.queries):
        if len(query) > limits.max_query_chars:
            raise RequestError(422, f"queries[{index}] exceeds {limits.max_query_chars} characters")
    top_k = request.topk or limits.default_top_k
    if not 1 <= top_k <= limits.max_top_k:
        raise RequestError(422, f"topk={top_k}: give 1 to {limits.max_top_k}; 0 is {limits.default_top_k}")
    return RetrieveRequest(tuple(request.queries), top_k, request.return_scores)


def encode_result(results: Sequence[Sequence[Hit]], *, scores: bool) -> bytes:
    """The body of a reply."""
    rows: list[list[Any]] = [[_row(hit, scores) for hit in hits] for hits in results]
    return _encoder.encode({"result": rows})


def _row(hit: Hit, scores: bool) -> _Document | _ScoredDocument:
    document = _Document(hit.passage.id, contents_of(hit.passage))
    return _ScoredDocument(document, hit.score) if scores else document


def contents_of(passage: Passage) -> str:
    r"""Title and text as one string, ``"Title"\ntext``, which ``Passage.from_row`` reads."""
    return f'"{passage.title}"\n{passage.text}' if passage.title else passage.text


def encode_json(value: Any) -> bytes:
    """JSON of plain values."""
    return _encoder.encode(value)
