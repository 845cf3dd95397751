"""Indexes of vectors behind ``sorl-serve``, through the client: what a search in process finds."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import format_passages
from sorl_tools.index import open_index
from sorl_tools.index.build.build import build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.index import read_manifest
from sorl_tools.search.http import HttpSearch
from sorl_tools.serve.server import open_source

from ..loopback import EmbeddingsServer, embeddings

pytest.importorskip("faiss", reason="needs pip install -e '.[search]'")

WORDS = "river green salt carmen opera piano castle bridge harbour violin winter garden".split()


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    pairs = [(a, b) for a in WORDS for b in WORDS if a != b]
    rows = (
        {"id": f"{a}-{b}", "contents": f'"{a.title()}"\nthe {b} and the {a} of {b[::-1]}'} for a, b in pairs
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "faiss"), [("dense", "flat"), ("dense", "sq4"), ("hybrid", "flat")])
def test_a_server_finds_what_the_index_finds(
    start: Any, passages: Path, tiny_model: Path, tmp_path: Path, backend: str, faiss: str
) -> None:
    build([passages], tmp_path / "index", backend, dense=DenseOptions(model=str(tiny_model), faiss=faiss))
    index = open_index(tmp_path / "index")
    queries = [f"the {word} and the {other}" for word, other in pairwise(WORDS)]
    expected = index.search(queries, 3)
    running = start(source=tmp_path / "index")
    assert running.request("GET", "/health").json["backend"] == backend
    search = HttpSearch(running.url, top_k=3)
    assert search.fingerprint == read_manifest(tmp_path / "index").hash
    assert [reply.text for reply in map(search, queries)] == [
        format_passages([hit.passage for hit in hits]).text for hits in expected
    ]
    sent = running.retrieve(queries=queries, topk=3, return_scores=True).json["result"]
    for hits, wanted in zip(sent, expected, strict=True):
        assert [hit["score"] for hit in hits] == pytest.approx([hit.score for hit in wanted], rel=1e-5)
    with ThreadPoolExecutor(16) as threads:  # in batches of other sizes scores round otherwise
        replies = list(threads.map(lambda n: search(queries[n % len(queries)]), range(200)))
    assert all(reply.hits == 3 for reply in replies)
    assert running.retrieve(queries=["", "\t"], topk=1).status == 200
    search.close()
    index.close()
    assert running.stop() == 0


@pytest.mark.slow
def test_a_model_that_has_moved(start: Any, passages: Path, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    build([passages], tmp_path / "index", "dense", dense=DenseOptions(model=str(tmp_path / "model")))
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    lost = start(source=tmp_path / "index", ready=False)
    assert lost.process.wait(60) == 2
    lost.wait_for("no such folder")
    running = start("--model", str(tmp_path / "elsewhere"), "--workers", "2", source=tmp_path / "index")
    assert len(running.retrieve(queries=["river"], topk=3).json["result"][0]) == 3


@pytest.mark.parametrize("option", ["model", "device"])
def test_words_need_no_model(corpus: Path, tmp_path: Path, option: str) -> None:
    build([corpus], tmp_path / "index")
    for source in (corpus, tmp_path / "index"):
        with pytest.raises(UserError, match=f"{option}=x: BM25 of .* embeds nothing"):
            open_source(source, **{option: "x"})


@pytest.mark.slow
def test_an_encoder_that_hangs_does_not_keep_the_server(start: Any, passages: Path, tmp_path: Path) -> None:
    encoder, asked, is_over = EmbeddingsServer(), threading.Event(), threading.Event()
    options = DenseOptions(model="m", encoder=encoder.address)
    build([passages], tmp_path / "index", "dense", dense=options)
    running = start("--drain_s", "0", source=tmp_path / "index")

    def hang(request: Any) -> Any:
        asked.set()
        is_over.wait(60)
        return embeddings(request)

    encoder.behaviours = [hang]
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(running.retrieve, queries=["harbour"])
        assert asked.wait(30)
        running.process.terminate()
        assert reply.result().status == 503
        assert running.process.wait(30) == 0
    is_over.set()
    encoder.close()
    assert not any("Traceback" in line for line in running.lines)
