"""Encode text around text from outside, which must not become a control token such as ``<|im_end|>``."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

_MARK = "sorl-text-{}"
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
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        added = {int(i): token for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self.special_ids = {str(token.content): i for i, token in added.items() if token.special}
        others = [str(token.content) for token in added.values() if token.content.strip()]
        tags = (text for text in others if text in template or text.startswith(("<", "[")))
        own = {mark for tag in own_tags for mark in (f"<{tag}>", f"</{tag}>")}
        self.texts = sorted(text for text in {*self.special_ids, *tags} - own if len(text) > 1)

    def occur_in(self, text: str) -> bool:
        """Whether ``text`` holds the text of a control token."""
        return any(token in text for token in self.texts)

    def encode(self, before: str, body: str, after: str) -> list[int]:
        """Token ids of the three texts together, in which no control token comes from ``body``.

        Where ``body`` holds the text of a control token, even one that its surroundings begin or end, the whole is
        encoded in two parts, cut inside it. Otherwise it is encoded in one piece.
        """
        return self.encode_parts([(before, False), (body, True), (after, False)])

    def encode_parts(
        self, parts: Iterable[tuple[str, bool]], *, add_special_tokens: bool = False
    ) -> list[int]:
        """As ``encode``, of texts with whether each of them comes from outside."""
        whole, cuts = "", {0}
        spans = []
        for text, is_outside in parts:
            spans += [(len(whole), len(whole) + len(text))] if is_outside else []
            whole += text
        cuts.update(cut for start, end in spans for cut in self._forged(whole, start, end))
        ids: list[int] = []
        edges = [*sorted(cuts), len(whole)]
        for start, end in itertools.pairwise(edges):
            first = add_special_tokens and start == 0
            ids += self._tokenizer.encode(whole[start:end], add_special_tokens=first)
        return ids

    def split(self, whole: str, outside: Any) -> list[tuple[str, bool]]:
        """``whole`` as ``encode_parts`` takes it.

        Args:
            outside: a JSON value, whose texts come from outside where, in their order, they are first found.
        """
        parts: list[tuple[str, bool]] = []
        for text in _texts_in(outside):
            if not self.occur_in(text):
                continue
            quoted = json.dumps(text, ensure_ascii=False)
            found = next((form for form in (quoted, quoted[1:-1], text) if form in whole), None)
            if found is not None:
                before, _, whole = whole.partition(found)
                parts += [(before, False), (found, True)]
        return [*parts, (whole, False)]

    def around(self, messages: Sequence[dict[str, str]], **options: Any) -> list[tuple[str, bool]]:
        """The rendered ``messages`` as ``encode_parts`` takes it: their contents come from outside.

        The template gets placeholders for them, so that it writes its own tokens around whatever they hold.
        """
        marks = [_MARK.format(number) for number in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        rest = str(self._tokenizer.apply_chat_template(marked, tokenize=False, **options))
        whole = str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        kept = [message["content"] for message in messages]
        for contents in (kept, [text.strip() for text in kept]):
            parts, end = [], rest
            for mark, text in zip(marks, contents, strict=True):
                before, _, end = end.partition(mark)
                parts += [(before, False), (text, True)]
            parts.append((end, False))
            if "".join(text for text, _ in parts) == whole:
                break  # otherwise the template strips them, or takes another branch for what one of them holds
        return parts

    def harmless(self, value: Any) -> Any:
        """A JSON value in whose texts each control token has a blank after its first letter."""
        if isinstance(value, str):
            for token in self.texts:
                value = value.replace(token, f"{token[0]} {token[1:]}")
            return value
        if isinstance(value, dict):
            return {self.harmless(name): self.harmless(one) for name, one in value.items()}
        return [self.harmless(one) for one in value] if isinstance(value, (list, tuple)) else value

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


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(one)
