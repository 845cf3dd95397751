"""What a client of ``sorl-serve-agent`` may send: text that is none, and JSON that is too much."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sorl_train.serve_agent.chat import RequestError, parse_request


def test_half_surrogate_pairs_in_a_request_are_replaced() -> None:
    body: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "who \ud800?"}]}
    body |= {"sorl": {"options": {"A": "\ude00\ud83d", "B": "\ud83d\ude00"}}}
    request = parse_request(json.dumps(body).encode(), "agent")
    assert request.question == "who \ufffd?"
    assert request.sorl.options == {"A": "\ufffd\ufffd", "B": "\U0001f600"}


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"model": ' * 5000,
        b'{"n": ' + b"1" * 5000 + b"}",
        b"\xff",
        b'{"' + b"m" * 999_999 + b'": 1}',
    ],
)
def test_hostile_json_in_a_request_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as found:
        parse_request(body, "agent")
    assert found.value.status == 400 and len(str(found.value)) < 1000
