"""Tokenizers for the tests of tool calls: real chat templates with the control tokens of their families, byte-level."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

OURS = Path(__file__).parent / "templates"
_CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
_TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
_GEMMA = (
    '<bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> '
    "<|channel> <channel|> <|think|>"
)
_MISTRAL = (
    "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [ARGS] "
    "[CALL_ID] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
)
# name -> (file, special tokens, added tokens that are not special, bos, eos)
FAMILIES: dict[str, tuple[str, str, str, str | None, str]] = {
    "qwen2.5": ("trl/qwen2_5", _CHATML, _TAGS, None, "<|im_end|>"),
    "qwen3": ("trl/qwen3", _CHATML, _TAGS, None, "<|im_end|>"),
    "qwen3-2507": ("trl/qwen3_instruct_2507", _CHATML, _TAGS, None, "<|im_end|>"),
    "qwen3.5": ("trl/qwen3_5_nothink", _CHATML, _TAGS, None, "<|im_end|>"),
    "qwen3.5-think": ("trl/qwen3_5_think", _CHATML, _TAGS, None, "<|im_end|>"),
    "qwen3.6": ("trl/qwen3_6", _CHATML, _TAGS, None, "<|im_end|>"),
    "nemotron3": ("trl/nemotron_3_nano", _CHATML, _TAGS, None, "<|im_end|>"),
    "llama3.1": ("trl/llama3_1", _LLAMA, "", "<|begin_of_text|>", "<|eot_id|>"),
    "llama3.2": ("trl/llama3_2", _LLAMA, "", "<|begin_of_text|>", "<|eot_id|>"),
    "gemma4": ("trl/gemma4_v5", _GEMMA, "", "<bos>", "<eos>"),
    "smollm2": ("smollm2", _CHATML, "", None, "<|im_end|>"),
    "smollm3": ("smollm3", _CHATML, _TAGS, None, "<|im_end|>"),
    "mistral-v3": ("mistral_v3", _MISTRAL, "", "<s>", "</s>"),
    "mistral-v13": ("mistral_v13", _MISTRAL, "", "<s>", "</s>"),
}


def template_text(name: str) -> str:
    """One of ours, or with ``trl/`` one that the package trl carries; without it the test is skipped."""
    package, _, file = name.rpartition("/")
    if not package:
        return (OURS / f"{file}.jinja").read_text(encoding="utf-8")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(
            "the chat templates of Qwen, Llama, Gemma and Nemotron are in the package trl: pip install trl==1.16.0"
        )
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{file}.jinja").read_text(encoding="utf-8")


@functools.lru_cache(maxsize=32)
def make_tokenizer(family: str) -> Any:
    """A byte-level tokenizer with a few hundred merges, and the template and control tokens of a family."""
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    file, specials, others, bos, eos = FAMILIES[family]
    template = template_text(file)
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    sentence = "The Tesla was named after Nikola Tesla, who was born in Smiljan."
    model.train_from_iterator([template, sentence], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=bos, eos_token=eos)
    controls = [AddedToken(token, special=True, normalized=False) for token in specials.split()]
    tokenizer.add_tokens(controls, special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in others.split()])
    tokenizer.chat_template = template
    return tokenizer
