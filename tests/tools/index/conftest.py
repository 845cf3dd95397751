"""Small corpora and a small embedding model."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from sorl_tools.corpus import Passage


def made_up(count: int, seed: int = 0) -> list[Passage]:
    """Passages of words that follow a long-tailed distribution, as text does."""
    draw = random.Random(seed)
    words = [f"{'abcdefghijklmnopqrst'[i % 20]}{'aeiou'[i % 5]}word{i:x}" for i in range(3000)]
    weights = [1 / (i + 1) for i in range(3000)]
    return [
        Passage(f"p{i}", f"Title {i}", " ".join(draw.choices(words, weights, k=draw.randint(0, 60))))
        for i in range(count)
    ]


def write_jsonl(path: Path, passages: Iterable[Passage]) -> Path:
    lines = (json.dumps({"id": p.id, "contents": f'"{p.title}"\n{p.text}'}) for p in passages)
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real sentence-transformers folder: a BERT of two thin layers with random weights, and mean pooling."""
    pytest.importorskip("sentence_transformers", reason="needs pip install 'sorl[search]'")
    pytest.importorskip("faiss", reason="needs pip install 'sorl[search]'")
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    source, target = tmp_path_factory.mktemp("bert"), tmp_path_factory.mktemp("models") / "tiny"
    characters = [chr(code) for code in (*range(97, 123), *range(48, 58))]
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *characters,
        *(f"##{c}" for c in characters),
        ":",
    ]
    (source / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(source)
    transformer = Transformer(str(source), max_seq_length=64)
    SentenceTransformer(modules=[transformer, Pooling(32), Normalize()], device="cpu").save(str(target))
    return target
