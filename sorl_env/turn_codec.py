"""The tokens of a turn format: the prompt, where a turn ends, its text, and the environment's reply.

Sampled turns are never encoded again. ``make_codec`` chooses between the codec of tags, here, and that of tool calls,
in ``chat_codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.parser import ParsedTurn
from sorl_env.task import Limits
from sorl_env.text import quoted, valid_text
from sorl_env.text_env import TextEnv
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
    """Tags: observations are plain text inside one long assistant message."""

    stop_ids: tuple[int, ...] = ()

    format: TurnFormat = TAGS

    def __init__(self, env: TextEnv, tokenizer: Tokenizer, *, use_chat_template: bool) -> None:
        self.stop = env.stop
        self._tokenizer = tokenizer
        self._is_raw = getattr(env, "format", None) == "raw"  # an environment that writes its own markup
        self._tools = tuple(end.strip("</>") for end in env.stop if end.startswith("</"))
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


def make_codec(env: TextEnv, tokenizer: Tokenizer, *, use_chat_template: bool) -> TurnCodec:
    """The codec of the environment's format for this tokenizer; the environment then reads turns as the codec does.

    An environment from elsewhere, which reads the policy's text itself, has the format ``tags``: plain text.

    Raises:
        UserError: format ``tool_calls`` without a chat template, or with one that renders no tool calls.
    """
    if not isinstance(env, ToolUseEnv) or env.format.name == "tags":
        return TagCodec(env, tokenizer, use_chat_template=use_chat_template)
    from sorl_env.chat_codec import chat_codec

    codec = chat_codec(tokenizer, env.toolbox.tools, use_chat_template=use_chat_template)
    env.format = codec.format
    return codec


def turn_text(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The turn as text, cut after its first stop string.

    The token that completes a stop string may hold more characters (``>\\n``, ``>.``). They are removed, because the
    sampler stopped there and the policy is not to blame for them.
    """
    text = valid_text(tokenizer.decode(ids, skip_special_tokens=True))
    ends = [text.find(word) + len(word) for word in stop if word in text]
    return text[: min(ends)] if ends else text


_SHOWN = 5  # rows that a message names
_MANY = 20_000  # prompts: counting so many takes seconds, which are announced


def first_context(env: TextEnv, codec: TurnCodec, prompt: str) -> list[int]:
    """The token ids of the running episode's prompt. Raises ``UserError`` if they are more than the limits allow."""
    ids = codec.prompt_ids(prompt, env.task.system_prompt)
    if len(ids) > _most(env.limits):
        raise UserError(
            f"the prompt of example {quoted(env.example.id, 80)} has {len(ids)} tokens, but the limit is "
            f"{_most(env.limits)}: give {_room_for(len(ids), env.limits)}, or remove the example from the data"
        )
    return ids


def check_prompts(
    envs: Sequence[TextEnv],
    tokenizer: Tokenizer,
    *,
    use_chat_template: bool,
    indices: Sequence[int] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> int:
    """Count the tokens of every prompt, so that no long one ends a run on its way; returns those of the longest.

    Not counted are the prompts of environments that write them only when an episode begins (``gym:``, ``openenv:``,
    ``Task.environment``). 90,000 prompts take about half a minute.

    Args:
        envs: the environments of one run, of one task; examples that two of them share are counted once.
        indices: of the examples to count, if not all.
        tell: gets a line when there are so many prompts that it takes a while.

    Raises:
        UserError: prompts are longer than the limits allow. The message names the longest, and the limit to set.
    """
    limits, longest, total = envs[0].limits, 0, 0
    seen: set[str] = set()
    long: list[str] = []
    for env in envs:
        examples = env.examples
        if not isinstance(env, ToolUseEnv) or examples.sha256 in seen:
            continue
        seen.add(examples.sha256)
        codec = make_codec(env, tokenizer, use_chat_template=use_chat_template)
        chosen = range(len(examples)) if indices is None else indices
        if len(chosen) > _MANY:
            tell(f"counting the tokens of {len(chosen):,} prompts ({examples.split})")
        for index in chosen:
            example = examples.examples[index]
            prompt = valid_text(env.format.prompt(env.task, example))
            size = len(codec.prompt_ids(prompt, env.task.system_prompt))
            longest, total = max(longest, size), total + 1
            if size > _most(limits):
                where = f"row {index + 1} of {examples.source}, split {examples.split}"
                long.append(f"  {where}, example {quoted(example.id, 80)}: {size:,} tokens")
    if long:
        shown, more = "\n".join(long[:_SHOWN]), len(long) - _SHOWN
        rest = f"\n  and {more:,} more" if more > 0 else ""
        raise UserError(
            f"{len(long):,} of {total:,} prompts are longer than the {_most(limits):,} tokens that the limits leave "
            f"them; the longest has {longest:,}:\n{shown}{rest}\n"
            f"Give {_room_for(longest, limits)}, or remove these rows from the data."
        )
    return longest


def _most(limits: Limits) -> int:
    """The tokens that a prompt may have: at least one has to be left for the policy."""
    return min(limits.max_prompt_tokens, limits.max_trajectory_tokens - 1)


def _room_for(tokens: int, limits: Limits) -> str:
    """The options with which a prompt of ``tokens`` fits. Where the whole trajectory has to grow, its turns keep their
    room."""
    options = f"--limits.max_prompt_tokens {tokens}" if tokens > limits.max_prompt_tokens else ""
    if tokens >= limits.max_trajectory_tokens:
        room = max(1, limits.max_trajectory_tokens - limits.max_prompt_tokens)
        options += f" --limits.max_trajectory_tokens {tokens + room}"
    return options.strip()
