"""Encode text as token ids: the prompt once, then each observation. Sampled turns are never encoded again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from sorl_env.control_tokens import control_tokens
from sorl_env.text import valid_text

TAGS = ("think", "answer", "information")  # of the turn format, beside those of the tools


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that rollouts use."""

    chat_template: Any
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str,
    system_prompt: str | None = None,
    *,
    use_chat_template: bool = True,
    tools: Collection[str] = (),
) -> list[int]:
    """Token ids of the first context, up to where the policy's first turn begins.

    With a chat template the prompt is one user message, and the policy writes one long assistant message into which
    observations are inserted as plain text (the layout of Search-R1), so no template ever rewrites earlier text.
    Without one (base models, ``use_chat_template=False``) the text is encoded as it is, after the tokenizer's BOS if it
    has one. A control token such as ``<|im_end|>`` in the prompt gets a blank; those of the template stay.

    Args:
        tools: names of tools, whose tags stay as they are where the tokenizer has tokens for them.
    """
    control = control_tokens(tokenizer, (*TAGS, *tools))
    given = [system_prompt, prompt] if system_prompt else [prompt]
    texts = [control.harmless(valid_text(text)) for text in given]
    if use_chat_template and tokenizer.chat_template:
        roles = ("system", "user")[-len(texts) :]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # the template has added the special tokens already
        return tokenizer.encode(valid_text(text), add_special_tokens=False)
    return tokenizer.encode("\n\n".join(texts), add_special_tokens=True)


def encode_text(tokenizer: Tokenizer, text: str, tools: Collection[str] = ()) -> list[int]:
    """Token ids of a text from outside within a dialogue, such as a reply of the environment: no control tokens."""
    control = control_tokens(tokenizer, (*TAGS, *tools))
    return tokenizer.encode(control.harmless(text), add_special_tokens=False)
