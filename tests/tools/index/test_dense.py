"""Vectors, flat and compressed, and the fusion with BM25, with a real embedding model of random weights."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index import open_index
from sorl_tools.index.build import dense as dense_build
from sorl_tools.index.build.build import build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.index import fuse

from ..corpora import made_up, write_jsonl

faiss = pytest.importorskip("faiss", reason="needs pip install -e '.[search]'")
pytest.importorskip("sentence_transformers", reason="needs pip install -e '.[search]'")

from sorl_tools.index.encoder import (  # noqa: E402
    LocalEncoder,
    Prefixes,
    named_prefixes,
    open_encoder,
)
from sorl_tools.index.vectors import FaissVectors, FlatVectors  # noqa: E402


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    filled = [p for p in made_up(420) if len(p.text.split()) > 6][:300]
    return [*filled, *filled[:10]]  # some twice, for ties


@pytest.fixture(scope="module")
def corpus(passages: list[Passage], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "c.jsonl", passages)


def texts(passages: list[Passage]) -> list[str]:
    return [dense_build.text_of(passage) for passage in passages]


def test_flat_is_exact_and_breaks_ties_in_corpus_order(
    corpus: Path, passages: list[Passage], tiny_model: Path, tmp_path: Path
) -> None:
    manifest = build([corpus], tmp_path / "index", "dense", dense=DenseOptions(model=str(tiny_model)))
    index = open_index(tmp_path / "index")
    encoder = open_encoder(str(tiny_model))
    vectors = encoder.passages(texts(passages), 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    queries = [f"{p.title}\n{p.text}" for p in passages[:20]]
    scores = encoder.queries(queries).astype(np.float64) @ vectors.astype(np.float64).T
    for row, hits in zip(scores, index.search(queries, 5), strict=True):
        assert [hit.score for hit in hits] == pytest.approx(sorted(row, reverse=True)[:5], abs=1e-5)
    first = index.search(queries[:1], 2)[0]
    assert [hit.passage for hit in first] == [passages[0], passages[300]]
    assert first[0].score == first[1].score == pytest.approx(1, abs=1e-5)
    assert manifest.parameters["dense"]["dim"] == 32
    assert index.search([], 3) == []
    assert len(index.search(["x", "\ud800", ""], 1000)[1]) == len(passages)
    with pytest.raises(UserError, match="top_k=0"):
        index.search(["x"], 0)
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda _: index.search(queries, 5), range(8)))
    assert all(one == again[0] for one in again)
    index.close()


@pytest.mark.parametrize("kind", ["fp16", "sq8", "sq4", "pq", "hnsw", "IVF4,SQ8"])
def test_compressed_kinds_find_what_flat_finds(
    corpus: Path, tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    """On made-up vectors, as far apart as those of a trained model."""
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((310, 32), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.save(tmp_path / "v.npy", vectors)
    options = DenseOptions(model=str(tiny_model), faiss=kind, vectors=tmp_path / "v.npy")
    manifest = build([corpus], tmp_path / "index", "dense", dense=options)
    open_index(tmp_path / "index").close()
    compressed = FaissVectors(
        tmp_path / "index" / "dense" / "index.faiss", manifest.parameters["dense"]["settings"]
    )
    queries = vectors[:100] + draw.standard_normal((100, 32), dtype=np.float32) * np.float32(0.05)
    exact = FlatVectors(tmp_path / "v.npy")
    wanted = [set(places.tolist()) for places, _ in exact.search(queries, 5)]
    found = [set(places.tolist()) for places, _ in compressed.search(queries, 5)]
    assert all(place in one for place, one in enumerate(found))
    overlap = sum(len(a & b) for a, b in zip(wanted, found, strict=True)) / 500
    assert overlap > 0.85
    assert manifest.hash == build([corpus], tmp_path / "again", "dense", dense=options).hash


@pytest.mark.parametrize(("kind", "fits_a_gpu"), [("IVF4,Flat", True), ("sq4", False)])
def test_a_build_for_gpus_is_given_what_it_can_hold(
    corpus: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fits_a_gpu: bool,
) -> None:
    """Stands for FAISS on a GPU, which refuses most compressed kinds and takes the lists to read from the original."""
    options = DenseOptions(model=str(tiny_model), faiss=kind)
    manifest = build([corpus], tmp_path / "index", "dense", dense=options)
    copied = []

    def copy_to_gpus(index: Any) -> Any:
        if not fits_a_gpu:
            raise RuntimeError("This index type is not implemented on GPU.")
        copied.append(index.nprobe)
        return index

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", copy_to_gpus, raising=False)
    settings = manifest.parameters["dense"]["settings"]
    vectors = FaissVectors(tmp_path / "index" / "dense" / "index.faiss", settings)
    assert copied == ([settings["nprobe"]] if fits_a_gpu else [])
    ((places, _),) = vectors.search(np.ones((1, vectors.shape[1]), dtype=np.float32), 5)
    assert len(places) == 5


def test_a_stopped_embedding_goes_on_and_ends_the_same(
    corpus: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_build, "CHUNK", 64)
    options = DenseOptions(model=str(tiny_model), faiss="sq8")
    whole = build([corpus], tmp_path / "whole", "dense", dense=options)
    embed = LocalEncoder.passages
    embedded: list[int] = []

    def stop_at_third(self: LocalEncoder, texts: list[str], batch_size: int) -> np.ndarray:
        if len(embedded) == 3:
            embedded.append(0)
            raise KeyboardInterrupt
        embedded.append(len(texts))
        return embed(self, texts, batch_size)

    monkeypatch.setattr(LocalEncoder, "passages", stop_at_third)
    with pytest.raises(UserError, match=r"FAISS knows no such index of .* give another kind"):
        build([corpus], tmp_path / "index", "dense", dense=DenseOptions(str(tiny_model), faiss="PQ7x4fsX"))
    assert not embedded
    with pytest.raises(KeyboardInterrupt):
        build([corpus], tmp_path / "index", "hybrid", dense=DenseOptions(str(tiny_model), faiss="flat"))
    with (tmp_path / "index" / "embedded.f32").open("ab") as file:
        file.write(b"half a vector")  # what kill -9 may leave
    other = DenseOptions(model=str(tiny_model), faiss="sq8", passage_prefix="x")
    with pytest.raises(UserError, match="finish that build with its own command, or add --restart"):
        build([corpus], tmp_path / "index", "dense", dense=other)
    assert build([corpus], tmp_path / "index", "dense", dense=options).hash == whole.hash
    assert embedded == [64, 64, 64, 0, 64, 54]


def test_prefixes_reach_the_model(
    corpus: Path, passages: list[Passage], tiny_model: Path, tmp_path: Path
) -> None:
    e5 = tmp_path / "e5-tiny-v2"
    shutil.copytree(tiny_model, e5)
    assert open_encoder(str(tiny_model)).prefixes == Prefixes("", "")
    by_name = open_encoder(str(e5))
    assert by_name.prefixes == Prefixes("query: ", "passage: ")
    assert open_encoder(str(e5), query_prefix="", passage_prefix="p").prefixes == Prefixes("", "p")
    bare = open_encoder(str(tiny_model))
    np.testing.assert_allclose(by_name.queries(["who"]), bare.queries(["query: who"]), atol=1e-6)
    prefixed = Passage("0", f"passage: {passages[0].title}", passages[0].text)
    np.testing.assert_allclose(
        by_name.passages(texts(passages[:1]), 8), bare.passages(texts([prefixed]), 8), atol=1e-6
    )
    settings = json.loads((e5 / "config_sentence_transformers.json").read_text())
    settings["prompts"] = {"query": "Q: ", "document": "D: "}
    (e5 / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert open_encoder(str(e5)).prefixes == Prefixes("Q: ", "D: ")  # the model's own word counts most
    options = DenseOptions(model=str(tiny_model), query_prefix="ask ", passage_prefix="doc ")
    facts = build([corpus], tmp_path / "index", "dense", dense=options).parameters["dense"]
    assert (facts["query_prefix"], facts["passage_prefix"]) == ("ask ", "doc ")


def test_e5_is_known_by_name() -> None:
    for name in ("intfloat/e5-base-v2", "intfloat/multilingual-e5-large", "/models/E5"):
        assert named_prefixes(["", name]) == Prefixes("query: ", "passage: ")
    for name in ("all-MiniLM-L6-v2", "someone/see5", "base5-x"):
        assert named_prefixes([name]) == Prefixes("", "")


def test_another_model_is_refused(corpus: Path, tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    out = tmp_path / "index"
    build([corpus], out, "dense", dense=DenseOptions(model=str(tiny_model)))
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(tiny_model, moved)
    open_index(out, model=str(moved)).close()  # the same weights, elsewhere
    shutil.copytree(tiny_model, other)
    (weights,) = other.rglob("model.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[name][0, 0] += 1e-3
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="it embeds otherwise than the model"):
        open_index(out, model=str(other))
    with pytest.raises(UserError, match="no such folder"):
        open_index(out, model=str(tmp_path / "nowhere"))


def test_hybrid_fuses_by_rank(
    corpus: Path, passages: list[Passage], tiny_model: Path, tmp_path: Path
) -> None:
    assert fuse([[7, 3], [3, 5]], rrf_k=1) == [(3, 1 / 3 + 1 / 2), (7, 1 / 2), (5, 1 / 3)]
    assert fuse([[4], [2]], rrf_k=60) == [(2, 1 / 61), (4, 1 / 61)]  # ties in the order of the corpus
    options = DenseOptions(model=str(tiny_model))
    build([corpus], tmp_path / "hybrid", "hybrid", dense=options, rrf_k=10, depth=20)
    build([corpus], tmp_path / "dense", "dense", dense=options)
    build([corpus], tmp_path / "bm25")
    both, vectors, words = (open_index(tmp_path / name) for name in ("hybrid", "dense", "bm25"))
    queries = [p.text for p in passages[:30]]
    ranked = zip(both.search(queries, 5), words.search(queries, 20), vectors.search(queries, 20), strict=True)
    for hits, by_words, by_vectors in ranked:
        scores: dict[str, float] = {}
        for ranking in (by_words, by_vectors):
            for rank, hit in enumerate(ranking, start=1):
                if hit.passage.id not in {p.id for p in passages[:10]}:  # ids of those occur twice
                    scores[hit.passage.id] = scores.get(hit.passage.id, 0) + 1 / (10 + rank)
        for hit in hits:
            if hit.passage.id in scores:
                assert hit.score == pytest.approx(scores[hit.passage.id])
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert both.search(["?"], 3)[0]  # no word to search by: the vectors alone answer
    for index in (both, vectors, words):
        index.close()


def test_vectors_made_elsewhere(
    corpus: Path, passages: list[Passage], tiny_model: Path, tmp_path: Path
) -> None:
    vectors = open_encoder(str(tiny_model)).passages(texts(passages), 64)
    np.save(tmp_path / "v.npy", vectors)
    options = DenseOptions(model=str(tiny_model), vectors=tmp_path / "v.npy")
    build([corpus], tmp_path / "index", "dense", dense=options)
    np.testing.assert_array_equal(np.load(tmp_path / "index" / "dense" / "vectors.npy"), vectors)
    for wrong in (vectors[1:], vectors.astype(np.float64), vectors[:, 1:], np.asfortranarray(vectors)):
        np.save(tmp_path / "v.npy", wrong)
        with pytest.raises(UserError, match=r"310 passages and this model need float32 \(310, 32\)"):
            build([corpus], tmp_path / "other", "dense", dense=options, restart=True)
    (tmp_path / "v.npy").write_text("no array")
    with pytest.raises(UserError, match=r"not a .npy file"):
        build([corpus], tmp_path / "other", "dense", dense=options, restart=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DenseOptions(), "needs --model"),
        (DenseOptions(model="x", faiss="sq5"), r"--faiss 'sq5' is unknown.* Did you mean"),
        (DenseOptions(model="x", vectors=Path("nowhere.npy")), "--vectors nowhere.npy: no such file"),
        (DenseOptions(model="./nowhere"), "--model ./nowhere: no such folder"),
    ],
)
def test_options_that_cannot_be_met(
    corpus: Path, tmp_path: Path, options: DenseOptions, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build([corpus], tmp_path / "index", "dense", dense=options)
    assert not (tmp_path / "index").exists()  # said before an hour of reading


def test_factories(corpus: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert dense_build.factory_string("ivfpq", 384, 21_000_000) == "IVF16384,PQ384x4fs"
    assert dense_build.factory_string("pq", 768, 10) == "PQ768x4fs"
    assert dense_build.factory_string("IVF10,Flat", 8, 10) == "IVF10,Flat"
    refusals = {"NOPE": "knows no such index of 32", "IVF1000,Flat": "cannot index 310 vectors of 32"}
    for refused, why in refusals.items():
        with pytest.raises(UserError, match=f"--faiss {refused}: FAISS {why} elements"):
            options = DenseOptions(model=str(tiny_model), faiss=refused)
            build([corpus], tmp_path / "index", "dense", dense=options, restart=True)
