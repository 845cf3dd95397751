"""Per-token figures as a file: exact to four digits, whole or not at all, and faults named by line."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_train.run.metrics_log import TokenRecord, iter_token_records, sidecar_of, write_token_records

RECORD = TokenRecord(
    id="s1-p0/0",
    tokens=["<think>", "é\u2028", "</script>"],
    turn=[0, 0, 1],
    log_ratio=[0.123456, -0.00001, math.nan],
    ratio=[1.131400, 1.0, math.inf],
    advantage=[-1.5, 0.25, 0.0],
    entropy=[2.0, 0.33336, 1e-9],
    clipped=[0, 0, 1],
)
LINE = {
    "id": "s1-p0/0",
    "tokens": ["<think>", "é\u2028", "</script>"],
    "turn": [0, 0, 1],
    "log_ratio": [0.1235, 0.0, None],
    "ratio": [1.1314, 1.0, None],
    "advantage": [-1.5, 0.25, 0.0],
    "entropy": [2.0, 0.3334, 0.0],
    "clipped": [0, 0, 1],
}


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    write_token_records(path, [RECORD, TokenRecord("s1-p0/1", [], [], [], [], [], [], [])])
    raw = gzip.decompress(path.read_bytes())
    lines = raw.decode().splitlines()
    assert [len(lines), json.loads(lines[0]), b"-0.0" in raw, b"NaN" in raw] == [2, LINE, False, False]
    first, second = iter_token_records(path)
    assert (first.tokens, first.turn, first.clipped) == (RECORD.tokens, [0, 0, 1], [0, 0, 1])
    assert first.ratio[:2] == [1.1314, 1.0] and math.isnan(first.ratio[2])
    assert (second.id, second.tokens) == ("s1-p0/1", [])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_file_of_a_step(tmp_path: Path) -> None:
    step = tmp_path / "step_000010.jsonl"
    assert sidecar_of(step) is None
    beside = tmp_path / "step_000010.tokens.jsonl.gz"
    write_token_records(beside, [RECORD])
    assert sidecar_of(step) == sidecar_of(tmp_path / "step_000010.jsonl.gz") == beside
    assert list(tmp_path.glob("step_*.jsonl")) == []


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"id": "s1"', "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps({k: v for k, v in LINE.items() if k != "entropy"}), "KeyError.'entropy'"),
        (json.dumps(LINE | {"ratio": [1.0]}), "sequences of different lengths"),
        (json.dumps(LINE | {"ratio": ["high", 1.0, 1.0]}), "could not convert string to float"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(LINE)}\n{line}\n".encode()))
    with pytest.raises(UserError, match=f"tokens.jsonl.gz:2: .*{message}"):
        list(iter_token_records(path))


def test_a_stream_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    write_token_records(path, [RECORD])
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match="the gzip stream is broken"):
        list(iter_token_records(path))
