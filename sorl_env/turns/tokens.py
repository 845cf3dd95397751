"""The tokens of the format ``tags``: the prompt once, then each observation. Sampled turns are never encoded again.

Text from outside must not become a control token such as ``<|im_end|>``, so each one in it gets a blank.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from sorl_env.errors import UserError
from sorl_env.text import valid_text
from sorl_env.turns.format import TAGS, TurnFormat
from sorl_env.turns.tags import ParsedTurn

# A tag, a word, or one mark: the tokens of ``model=tiny``, which decoding joins with blanks.
WORD_OR_MARK = r"</?\w+>|\w+|[^\w\s]"

# ``model=tiny`` also knows the words of this many dialogues, the first ones of its task's expert.
TINY_DIALOGUES = 64

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


_OWN_TAGS = ("think", "answer", "information")  # of the turn format, beside those of the tools


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that rollouts use."""

    chat_template: Any
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """The conversation in the template: text or token ids, as ``tokenize`` says."""


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
    control = control_tokens(tokenizer, (*_OWN_TAGS, *tools))
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
    control = control_tokens(tokenizer, (*_OWN_TAGS, *tools))
    return tokenizer.encode(control.harmless(text), add_special_tokens=False)


class TagCodec:
    """The tokens of the format ``tags``: observations are plain text inside one long assistant message.

    Attributes:
        format: the format as text.
        stop: strings that end a turn.
        stop_ids: tokens that end a turn, beside the model's own.

    Raises:
        UserError: a tag that ends a turn is a special token, which the text of a turn leaves out.
    """

    format: TurnFormat = TAGS
    stop_ids: tuple[int, ...] = ()

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], *, use_chat_template: bool, is_raw: bool
    ) -> None:
        self.stop = stop
        self._tokenizer = tokenizer
        self._is_raw = is_raw  # the environment writes its own markup, so its replies are encoded as they are
        self._tools = tuple(end.strip("</>") for end in stop if end.startswith("</"))
        self._use_chat_template = use_chat_template
        marks = {mark for end in stop for mark in (end, end.replace("</", "<"))}
        if hidden := sorted(marks & control_tokens(tokenizer).special_ids.keys()):
            raise UserError(
                f"the tokenizer has {', '.join(hidden)} as special tokens, which a turn's text leaves out: add them "
                "with special_tokens=False"
            )

    def prompt_ids(self, prompt: str, system_prompt: str | None) -> list[int]:
        """The first context, up to where the policy's first turn begins."""
        options: dict[str, Any] = {"use_chat_template": self._use_chat_template, "tools": self._tools}
        return encode_prompt(self._tokenizer, prompt, system_prompt, **options)

    def turn_text(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn, for the environment."""
        return turn_text(self._tokenizer, ids, self.stop)

    def reply_ids(
        self, ids: Sequence[int], parsed: ParsedTurn | None, observation: str, max_tokens: int
    ) -> list[int]:
        """The tokens between a sampled turn ``ids`` and the next one: the observation, cut to ``max_tokens``, and what
        the template writes around it."""
        if self._is_raw:
            return self._tokenizer.encode(observation, add_special_tokens=False)[:max_tokens]
        return tag_reply_ids(self._tokenizer, observation, max_tokens)

    def written_turn(self, parsed: ParsedTurn, text: str) -> tuple[str, list[int]]:
        """A turn of the task's expert, which writes tags, as this format's text and tokens."""
        return text, encode_text(self._tokenizer, text, self._tools)


def tag_reply_ids(tokenizer: Tokenizer, observation: str, max_tokens: int) -> list[int]:
    """Token ids of an observation between tags, at most ``max_tokens``; one that is cut keeps its closing tag."""
    whole = encode_text(tokenizer, observation)
    if len(whole) <= max_tokens:
        return whole
    body, tag, rest = observation.rpartition("\n</information>")
    tail = encode_text(tokenizer, tag + rest) if tag else []
    return encode_text(tokenizer, body)[: max(0, max_tokens - len(tail))] + tail


def turn_text(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The turn as text, cut after its first stop string.

    The token that completes a stop string may hold more characters (``>\\n``, ``>.``). They are removed, because the
    sampler stopped there and the policy is not to blame for them.
    """
    text = valid_text(tokenizer.decode(ids, skip_special_tokens=True))
    ends = [text.find(word) + len(word) for word in stop if word in text]
    return text[: min(ends)] if ends else text
