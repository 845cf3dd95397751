"""Encode text as token ids: the prompt once, then each observation. Sampled turns are never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sorl_env.text import valid_text


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that rollouts use."""

    chat_template: Any
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


def encode_prompt(
    tokenizer: Tokenizer, prompt: str, system_prompt: str | None = None, *, use_chat_template: bool = True
) -> list[int]:
    """Token ids of the first context, up to where the policy's first turn begins.

    With a chat template the prompt is one user message, and the policy writes one long assistant message into which
    observations are inserted as plain text (the layout of Search-R1), so no template ever rewrites earlier text.
    Without one (base models, ``use_chat_template=False``) the text is encoded as it is, after the tokenizer's BOS if it
    has one.
    """
    if use_chat_template and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        if system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # the template has added the special tokens already
        return tokenizer.encode(valid_text(text), add_special_tokens=False)
    text = f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
    return tokenizer.encode(valid_text(text), add_special_tokens=True)


def encode_observation(tokenizer: Tokenizer, text: str, max_tokens: int | None = None) -> list[int]:
    """Token ids of a reply of the environment, without special tokens, cut to ``max_tokens``."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if max_tokens is None else ids[:max_tokens]
