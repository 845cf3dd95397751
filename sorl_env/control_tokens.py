"""Text from outside must not become a control token such as ``<|im_end|>``, so each one in it gets a blank."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

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
