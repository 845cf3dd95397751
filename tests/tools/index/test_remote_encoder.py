"""Vectors from a real loopback server with OpenAI's embeddings API, which misbehaves on demand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sorl_env.errors import UserError
from sorl_tools.index import encoder as remote_encoder
from sorl_tools.index import open_index
from sorl_tools.index.build.build import build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.encoder import open_encoder

from ..corpora import made_up, write_jsonl
from ..loopback import EmbeddingsServer, Reply, embeddings, vector

pytest.importorskip("faiss", reason="needs pip install -e '.[search]'")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddingsServer]:
    monkeypatch.setattr(remote_encoder, "FIRST_PAUSE_S", 0.001)
    running = EmbeddingsServer()
    yield running
    running.close()  # a second time does no harm


def test_an_index_is_built_and_searched_by_the_server(
    server: EmbeddingsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote_encoder.TOKEN_VARIABLE, "s3cret")
    passages = made_up(50)
    corpus = write_jsonl(tmp_path / "c.jsonl", passages)
    options = DenseOptions(model="intfloat/multilingual-e5-small", encoder=server.address, batch_size=20)
    facts = build([corpus], tmp_path / "index", "hybrid", dense=options).parameters["dense"]
    assert (facts["query_prefix"], facts["passage_prefix"], facts["dim"]) == ("query: ", "passage: ", 16)
    assert (facts["encoder"], facts["model"]) == (server.address, "intfloat/multilingual-e5-small")
    assert {(one["path"], one["token"]) for one in server.requests} == {("/v1/embeddings", "Bearer s3cret")}
    assert [len(one["input"]) for one in server.requests] == [2, 20, 20, 10]
    assert server.requests[1]["input"][0] == f"passage: Title 0\n{passages[0].text}"
    moved = EmbeddingsServer()
    for address in (None, moved.address):
        index = open_index(tmp_path / "index", model=address)
        assert len(index.search(["who?"] * 40, 3)) == 40
        index.close()
    assert moved.requests[-1]["input"] == ["query: who?"] * 8
    moved.close()
    with pytest.raises(
        UserError, match=r"it embeds otherwise than the model .*intfloat/multilingual-e5-small"
    ):
        moved = EmbeddingsServer()
        moved.behaviours = [lambda request: embeddings({**request, "model": "another"})]
        open_index(tmp_path / "index", model=moved.address)
    moved.close()


def test_what_was_embedded_before_the_server_went_out_is_kept(
    server: EmbeddingsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sorl_tools.index.build.dense.CHUNK", 10)
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(30))
    server.behaviours = [embeddings] * 3 + [lambda request: (503, b"")] * remote_encoder.TRIES
    options = DenseOptions(model="m", encoder=server.address)
    with pytest.raises(UserError, match="is the server running"):
        build([corpus], tmp_path / "index", "dense", dense=options)
    server.behaviours = [lambda request: embeddings({**request, "model": "another"})]
    with pytest.raises(UserError, match="it embeds otherwise than when this build began"):
        build([corpus], tmp_path / "index", "dense", dense=options)
    server.requests.clear()
    assert build([corpus], tmp_path / "index", "dense", dense=options).passages == 30
    assert [len(one["input"]) for one in server.requests] == [2, 10]


def test_vectors_are_of_length_1_and_in_the_order_of_the_texts(server: EmbeddingsServer) -> None:
    encoder = open_encoder("m", server.address, "q ", "p ")
    wanted = np.array([vector(f"p {text}", "m") for text in "abc"], dtype=np.float32)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.passages(["a", "b", "c"], 2), wanted, rtol=1e-5)
    assert encoder.queries(["\ud800"]).shape == (1, 16)
    assert server.requests[-1]["input"] == ["q ?"]


@pytest.mark.parametrize("status", [408, 503])
def test_trouble_is_tried_again_and_then_said(server: EmbeddingsServer, status: int) -> None:
    encoder = open_encoder("m", server.address)
    server.behaviours = [lambda request: (status, b"busy")] * 2
    assert encoder.queries(["x"]).shape == (1, 16)
    server.behaviours = [lambda request: (status, b"busy")] * 6
    with pytest.raises(
        UserError, match=f"no answer after 6 tries .it answered {status}: 'busy'.; is the server"
    ):
        encoder.queries(["x"])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda request: embeddings(request, dim=8), r"vectors of the shape \(1, 8\), wanted \(1, 16\)"),
        (lambda request: embeddings({**request, "input": ["a", "b"]}), r"the shape \(2, 16\), wanted \(1, 16\)"),
        (lambda request: (200, b'{"data": [{"index": 0, "embedding": [0, 0]}]}'), r"shape \(1, 2\)"),
        (lambda request: (200, json.dumps({"data": [{"index": 0, "embedding": [0] * 16}]}).encode()), "zero"),
        (lambda request: (200, b'{"data": [{"index": 0, "embedding": ' + b"[NaN" + b", 1" * 15 + b"]}]}"), "finite"),
        (lambda request: (200, b'{"data": [{"index": 0, "embedding": "AAAA"}]}'), "not a reply of OpenAI's"),
        (lambda request: (200, b"[]"), "not a reply of OpenAI's embeddings API"),
        (lambda request: (200, b"<html>"), "not a reply of OpenAI's"),
        (lambda request: (404, b"no such model"), "answered 404: 'no such model'; check the address"),
        (lambda request: (401, b"who?"), "set SORL_ENCODER_TOKEN to its token"),
    ],
)  # fmt: skip
def test_wrong_replies_are_refused_at_once(
    server: EmbeddingsServer, reply: Callable[[Any], Reply], message: str
) -> None:
    encoder = open_encoder("m", server.address)
    server.requests.clear()
    server.behaviours = [reply]
    with pytest.raises(UserError, match=message):
        encoder.queries(["x"])
    assert len(server.requests) == 1


def test_what_cannot_be_asked(server: EmbeddingsServer) -> None:
    for address in ("localhost:8080", "ftp://host/v1", "http://", "http://host:port/"):
        with pytest.raises(UserError, match=r"give an address such as http://127\.0\.0\.1:8080/v1"):
            open_encoder("m", address)
    with pytest.raises(UserError, match="device=cpu: the encoder at"):
        open_encoder("m", server.address, device="cpu")
    with pytest.raises(UserError, match="needs --model"):
        open_encoder("", server.address)
    server.close()
    with pytest.raises(UserError, match=r"no answer after 6 tries .ConnectError: .*is the server running"):
        open_encoder("m", server.address)
