"""Encode text as token ids: the prompt once, then each observation. Sampled turns are never encoded again.

Text from outside must not become a control token such as ``<|im_end|>``, so each one in it gets a blank.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from sorl_env.text import valid_text

_known: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], ControlTokens]] = weakref.WeakKeyDictionary()


def control_tokens(tokenizer: Any, own_tags: Collection[str] = ()) -> ControlTokens:
    """The control tokens of a tokenizer, found once; the tags ``own_tags`` of a turn format are not among them."""
    key = (str(getattr(tokenizer, "chat_template", None)), *sorted(own_tags))
    known = _known.setdefault(tokenizer, {})
    if key not in known:
        known[key] = ControlTokens(tokenizer, own_tags)
    return known[key]


class ControlTokens:
    """The control tokens of a tokenizer; takes a transformers tokenizer.

    Attributes:
        special_ids: the special tokens, with their ids.
        texts: what must not become a token when it comes from outside: the special tokens, and the added tokens that
            the template writes or that look like a tag. Many tokenizers do not count ``<tool_call>`` as special. Other
            added tokens, such as a run of blanks, are ordinary text.
    """

    def __init__(self, tokenizer: Any, own_tags: Collection[str] = ()) -> None:
        template = str(tokenizer.chat_template)
        added = {int(i): token for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self.special_ids = {str(token.content): i for i, token in added.items() if token.special}
        others = [str(token.content) for token in added.values() if token.content.strip()]
        tags = (text for text in others if text in template or text.startswith(("<", "[")))
        own = {mark for tag in own_tags for mark in (f"<{tag}>", f"</{tag}>")}
        self.texts = sorted(text for text in {*self.special_ids, *tags} - own if len(text) > 1)

    def harmless(self, value: Any) -> Any:
        """A text, or a JSON value with texts, in which each control token has a blank after its first letter."""
        if isinstance(value, str):
            for token in self.texts:
                value = value.replace(token, f"{token[0]} {token[1:]}")
            return value
        if isinstance(value, dict):
            return {self.harmless(name): self.harmless(one) for name, one in value.items()}
        return [self.harmless(one) for one in value] if isinstance(value, (list, tuple)) else value

    def start_of(self, text: str, at: int) -> int:
        """``at``, or where a control token begins that ``at`` lies inside of."""
        starts = (text.rfind(token, max(0, at - len(token) + 1), at + len(token) - 1) for token in self.texts)
        return min([at, *(start for start in starts if start >= 0)])


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
