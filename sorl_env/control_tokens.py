"""Encode text around text from outside, which must not become a control token such as ``<|im_end|>``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class ControlTokens:
    """The control tokens of a tokenizer with a chat template; takes a transformers tokenizer.

    Attributes:
        special_ids: the special tokens, with their ids.
        texts: what must not become a token when it comes from outside: the special tokens, and the added tokens that
            the template writes or that look like a tag. Many tokenizers do not count ``<tool_call>`` as special. Other
            added tokens, such as a run of blanks, are ordinary text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
        self.special_ids = {str(token.content): i for i, token in added.items() if token.special}
        others = [str(token.content) for token in added.values() if token.content.strip()]
        tags = (text for text in others if text in template or text.startswith(("<", "[")))
        self.texts = sorted(text for text in {*self.special_ids, *tags} if len(text) > 1)

    def encode(self, before: str, body: str, after: str) -> list[int]:
        """Token ids of the three texts together, in which no control token comes from ``body``.

        Where ``body`` holds the text of a control token, even one that its surroundings begin or end, the whole is
        encoded in two parts, cut inside it. Otherwise it is encoded in one piece.
        """
        whole = before + body + after
        cuts = sorted(set(self._forged(whole, len(before), len(before) + len(body))))
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            ids += self._tokenizer.encode(whole[start:end], add_special_tokens=False)
        return ids

    def start_of(self, text: str, at: int) -> int:
        """``at``, or where a control token begins that ``at`` lies inside of."""
        starts = [at]
        for token in self.texts:
            start = text.rfind(token, max(0, at - len(token) + 1), at + len(token) - 1)
            starts += [start] if start >= 0 else []
        return min(starts)

    def _forged(self, text: str, start: int, end: int) -> Iterator[int]:
        """Where to cut the text, so that no control token has a part in ``text[start:end]``."""
        if start == end:
            return
        for token in self.texts:
            at = text.find(token, max(0, start - len(token) + 1), end + len(token) - 1)
            while at >= 0:
                yield at + 1
                at = text.find(token, at + 1, end + len(token) - 1)
