"""The tokens of a turn format: the prompt, where a turn ends, its text, and the environment's reply.

Sampled turns are never encoded again. The codec of tags is here, that of tool calls in ``chat_codec``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sorl_env.parser import ParsedTurn
from sorl_env.text import valid_text
from sorl_env.tokens import Tokenizer, encode_prompt, encode_text
from sorl_env.turn_format import TAGS, TurnFormat


class TurnCodec(Protocol):
    """What a rollout asks of a format.

    Attributes:
        format: the same format as text, with what the tokenizer's template adds to it.
        stop: strings that end a turn.
        stop_ids: tokens that end a turn, beside the model's own.
    """

    format: TurnFormat
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]

    def prompt_ids(self, prompt: str, system_prompt: str | None) -> list[int]:
        """The first context, up to where the policy's first turn begins."""
        ...

    def turn_text(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn, for the environment."""
        ...

    def reply_ids(
        self, ids: Sequence[int], parsed: ParsedTurn | None, observation: str, max_tokens: int
    ) -> list[int]:
        """What is appended between a sampled turn ``ids`` and the next one: the observation of at most ``max_tokens``,
        a longer one cut, and what the template writes around it."""
        ...

    def written_turn(self, parsed: ParsedTurn, text: str) -> tuple[str, list[int]]:
        """A turn of the task's expert, which writes tags, as this format's text and tokens."""
        ...


class TagCodec:
    """Tags: observations are plain text inside one long assistant message.

    Args:
        stop: strings that end a turn of the environment.
        is_raw: the environment writes its own markup, so its replies are encoded as they are.
    """

    stop_ids: tuple[int, ...] = ()

    format: TurnFormat = TAGS

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...], *, use_chat_template: bool, is_raw: bool
    ) -> None:
        self.stop = stop
        self._tokenizer = tokenizer
        self._is_raw = is_raw
        self._tools = tuple(end.strip("</>") for end in stop if end.startswith("</"))
        self._use_chat_template = use_chat_template

    def prompt_ids(self, prompt: str, system_prompt: str | None) -> list[int]:
        return encode_prompt(
            self._tokenizer,
            prompt,
            system_prompt,
            use_chat_template=self._use_chat_template,
            tools=self._tools,
        )

    def turn_text(self, ids: Sequence[int]) -> str:
        return turn_text(self._tokenizer, ids, self.stop)

    def reply_ids(
        self, ids: Sequence[int], parsed: ParsedTurn | None, observation: str, max_tokens: int
    ) -> list[int]:
        if self._is_raw:
            return self._tokenizer.encode(observation, add_special_tokens=False)[:max_tokens]
        return tag_reply_ids(self._tokenizer, observation, max_tokens)

    def written_turn(self, parsed: ParsedTurn, text: str) -> tuple[str, list[int]]:
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
