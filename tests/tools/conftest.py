"""A small embedding model, for the tests of indexes and of servers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real sentence-transformers folder: a BERT of two thin layers with random weights, and mean pooling."""
    pytest.importorskip("sentence_transformers", reason="needs pip install -e '.[search]'")
    pytest.importorskip("faiss", reason="needs pip install -e '.[search]'")
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    source, target = tmp_path_factory.mktemp("bert"), tmp_path_factory.mktemp("models") / "tiny"
    characters = [chr(code) for code in (*range(97, 123), *range(48, 58))]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", *characters]
    vocabulary += [f"##{character}" for character in characters]
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
