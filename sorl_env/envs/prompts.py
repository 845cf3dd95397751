"""The prompts of an environment as tokens: the codec of its turns, the first context, and a check before a run that all
prompts fit the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sorl_env.envs.text_env import TextEnv
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task.task import Limits
from sorl_env.text import quoted, valid_text
from sorl_env.turns.chat_codec import ChatCodec, chat_codec
from sorl_env.turns.tokens import TagCodec, Tokenizer

TurnCodec = TagCodec | ChatCodec  # ``TagCodec`` says what their methods do
_SHOWN = 5  # rows that a message names
_MANY = 20_000  # prompts: counting more than these takes seconds, which are announced


def make_codec(env: TextEnv, tokenizer: Tokenizer, *, use_chat_template: bool) -> TurnCodec:
    """The codec of the environment's format for this tokenizer. Also sets ``env.format``.

    An environment from elsewhere, which reads the policy's text itself, has the format ``tags``: plain text.

    Raises:
        UserError: format ``tool_calls`` without a chat template, or with one that renders no tool calls.
    """
    if not isinstance(env, ToolUseEnv) or env.format.name == "tags":
        is_raw = getattr(env, "format", None) == "raw"
        return TagCodec(tokenizer, env.stop, use_chat_template=use_chat_template, is_raw=is_raw)
    codec = chat_codec(tokenizer, env.toolbox.tools, use_chat_template=use_chat_template)
    env.format = codec.format
    return codec


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
        tell: gets a line where counting takes more than a few seconds.

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
            prompt = valid_text(env.prompt(example))
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
