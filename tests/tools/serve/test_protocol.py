"""Requests and replies, without a server."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
import pytest

from sorl_tools.corpus import Passage
from sorl_tools.http_server.app import RequestError
from sorl_tools.serve.protocol import (
    RequestLimits,
    RetrieveRequest,
    contents_of,
    encode_result,
    parse_request,
)

LIMITS = RequestLimits(max_queries=3, max_query_chars=5, max_top_k=10, default_top_k=4)


class Found(NamedTuple):
    passage: Passage
    score: float


def parse(**fields: Any) -> tuple[tuple[str, ...], int, bool]:
    request = parse_request(json.dumps(fields).encode(), LIMITS)
    return request.queries, request.top_k, request.return_scores


def test_a_passage_reads_the_same_behind_the_protocol() -> None:
    rows = [
        {"id": "1", "text": "Opening hours: nine to five.\nClosed on Sundays."},
        {"id": "2", "title": '"Heroes" (album)', "text": "An album."},
        {"id": "3", "title": "A\nB", "text": "def f():\n    return 1"},
    ]
    for passage in map(Passage.from_row, rows):
        assert Passage.from_row({"id": passage.id, "contents": contents_of(passage)}) == passage


def test_what_a_request_says() -> None:
    assert parse(queries=["a", "b"], topk=2, return_scores=True) == (("a", "b"), 2, True)
    assert parse(queries=["a"], unknown={"x": 1}) == (("a",), 4, False)
    assert parse(queries=["a"], topk=None) == parse(queries=["a"], topk=0) == (("a",), 4, False)
    assert parse(queries=[]) == ((), 4, False)
    assert parse(queries=["", "   "])[0] == ("", "   ")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"queries": ["\xff\xfe"]}', 400, "not JSON"),
        (b'{"queries": ["\\ud800"]}', 400, "not JSON"),
        (b'{"queries": ["a"], "topk": NaN}', 400, "not JSON"),
        (b'{"queries": ["a"], "topk": Infinity}', 400, "not JSON"),
        (b'{"queries": ["a"], "topk": ' + b"9" * 10_000 + b"}", 4, "."),
        (b"[" * 100_000, 4, "."),
        (b'{"queries": ' + b"[" * 100_000, 4, "."),
        (b'{"x": ' * 100_000, 4, "."),
        (b"null", 422, "Expected `object`"),
        (b'["a"]', 422, "Expected `object`"),
        (b"{}", 422, "neither of `queries` and `query`"),
        (b'{"query": "a", "queries": ["a"]}', 422, "both of `queries` and `query`"),
        (b'{"query": ["a"]}', 422, "query"),
        (b'{"query": "sixsix"}', 422, "query exceeds 5 characters"),
        (b'{"queries": "a"}', 422, "Expected `array | null`, got `str`"),
        (b'{"queries": null}', 422, "neither of `queries` and `query`"),
        (b'{"queries": [1]}', 422, r"queries\[0\]"),
        (b'{"queries": ["a", null]}', 422, r"queries\[1\]"),
        (b'{"queries": ["a"], "topk": "3"}', 422, "topk"),
        (b'{"queries": ["a"], "topk": true}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 2.5}', 422, "topk"),
        (b'{"queries": ["a"], "topk": 1e400}', 4, "."),
        (b'{"queries": ["a"], "topk": -1}', 422, "topk=-1: give 1 to 10"),
        (b'{"queries": ["a"], "topk": 11}', 422, "topk=11: give 1 to 10"),
        (b'{"queries": ["a"], "topk": 1000000000000}', 422, "give 1 to 10"),
        (b'{"queries": ["a"], "return_scores": "yes"}', 422, "return_scores"),
        (b'{"queries": ["a", "b", "c", "d"]}', 422, "4 queries, at most 3: split the request"),
        (b'{"queries": ["a", "sixsix"]}', 422, r"queries\[1\] exceeds 5 characters"),
    ],
)
def test_what_is_no_request(body: bytes, status: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_request(body, LIMITS)
    assert caught.value.status == status or (status == 4 and caught.value.status in (400, 422))
    assert len(str(caught.value)) < 500


def test_replies() -> None:
    hits = [Found(Passage("7", "A title", "a text"), 1.5), Found(Passage("8", "", "no title"), 0.25)]
    scored = json.loads(encode_result([hits, []], RetrieveRequest((), 3, return_scores=True)))
    assert scored == {
        "result": [
            [
                {"document": {"id": "7", "contents": '"A title"\na text'}, "score": 1.5},
                {"document": {"id": "8", "contents": "no title"}, "score": 0.25},
            ],
            [],
        ]
    }
    bare = json.loads(encode_result([hits, []], RetrieveRequest((), 3)))
    assert bare == {"result": [[hit["document"] for hit in hits] for hits in scored["result"]]}
    for hit, sent in zip(hits, scored["result"][0], strict=True):
        assert Passage.from_row(sent["document"]) == hit.passage


def test_one_query_in_place_of_a_list() -> None:
    request = parse_request(b'{"query": "a", "topk": 2, "return_scores": true}', LIMITS)
    assert request == RetrieveRequest(("a",), 2, return_scores=True, is_single=True)
    hits = [Found(Passage("7", "A", "b"), 1.5)]
    assert json.loads(encode_result([hits], request)) == {
        "result": [[{"document": {"id": "7", "contents": '"A"\nb'}, "score": 1.5}]]
    }


@pytest.mark.parametrize("scores", [False, True])
def test_messagepack(scores: bool) -> None:
    hits = [Found(Passage("7", "A", "b"), 1.5)]
    hit = {"document": {"id": "7", "contents": '"A"\nb'}, "score": 1.5 if scores else None}
    asked: dict[str, Any] = {"topk": 2, "return_scores": scores}
    one = parse_request(msgspec.msgpack.encode({"query": "é", **asked}), LIMITS)
    assert one == RetrieveRequest(("é",), 2, scores, is_single=True, is_msgpack=True)
    assert msgspec.msgpack.decode(encode_result([hits], one)) == {"result": [hit]}
    assert msgspec.msgpack.decode(encode_result([[]], one)) == {"result": []}
    several = parse_request(msgspec.msgpack.encode({"queries": ["a", "b"], **asked}), LIMITS)
    assert several == RetrieveRequest(("a", "b"), 2, scores, is_msgpack=True)
    assert msgspec.msgpack.decode(encode_result([hits, []], several)) == {"result": [[hit], []]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\x80", 422),  # an empty map
        (b"\xde", 400),
        (b"\x81\xa7queries\xdd\xff\xff\xff\xff", 400),  # a list of four billion texts
        (b"\xdf\xff\xff\xff\xff", 400),  # as many fields
        (b"\x81\xa5query\xdb\xff\xff\xff\xffabc", 400),  # a text of four gigabytes
        (b"\x81\xa5query\xa3\xed\xa0\x80", 400),  # half a surrogate pair
        (b"\x81\xa5query\x01", 422),
        (b"\x81\xa5query\xa6sixsix", 422),
        (b"\x82\xa5query\xa1a\xa4topk\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", 422),  # NaN
        (b"\x82\xa5query\xa1a\xa4topk\x0b", 422),
        (b"\x81\xa1x" * 100_000, 400),
        (b"\x81\xa5query\xa1a\xc1", 400),  # more behind it
        (b"\xff\xfe{\x00}\x00", 422),  # UTF-16 is not JSON here
    ],
)
def test_what_is_no_messagepack_request(body: bytes, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(body, LIMITS)
    assert caught.value.status == status and len(str(caught.value)) < 500
