"""The tokens of tool calls: a chat template is rendered once with placeholders, and then only filled in.

Nothing that the policy sampled is rendered again. What the template writes between the end of a sampled message and the
beginning of the next one is taken from a dummy conversation (as TRL does): rendered with a placeholder for the
observation, it is cut after the token that ends the dummy call and at the placeholder. So the text of an observation
never reaches the template, and cannot take another branch of it.

Text from outside cannot become a control token either, see ``control_tokens``. It is encoded in one piece with its
surroundings, so that its tokens are those of the template's own rendering.
"""

from __future__ import annotations

import bisect
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import quoted, valid_text
from sorl_env.tool.tool import Tool
from sorl_env.turns.format import ToolCallFormat, TurnFormat
from sorl_env.turns.tags import ParsedTurn
from sorl_env.turns.tokens import Tokenizer, control_tokens
from sorl_env.turns.tool_calls import (
    REASONING_MARKERS,
    SYNTAXES,
    CallError,
    Syntax,
    arguments_of,
    calls_as_content,
    parse_message,
    read_call,
)

_MARK = 'sorl"text'  # the quotation mark shows whether the template writes a text as it is or as JSON
_ARGUMENT = "sorl argument"
_CALL_ID = "sorlcall0"  # nine letters and digits, which Mistral's templates ask for
_ALSO_ENDS = ("<|eom_id|>",)  # Llama's other end of a message
_STRAY_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
)  # models stop at them, too, and templates never end a message so
_codecs: weakref.WeakKeyDictionary[Any, dict[str, ChatCodec]] = weakref.WeakKeyDictionary()


def chat_codec(tokenizer: Tokenizer, tools: Sequence[Tool], *, use_chat_template: bool) -> ChatCodec:
    """The codec for a tokenizer and tools; it is made once for each. Raises as ``ChatCodec`` does."""
    if not use_chat_template or not tokenizer.chat_template:
        missing = "the tokenizer has none" if use_chat_template else "chat_template is false"
        raise UserError(
            f"format tool_calls writes the calls of the model's chat template, but {missing}: use an instruction-tuned "
            "model with its tokenizer, or format tags"
        )
    known = _codecs.setdefault(tokenizer, {})
    key = json.dumps([str(tokenizer.chat_template), *map(tool_schema, tools)], sort_keys=True)
    if key not in known:
        known[key] = ChatCodec(tokenizer, tools)
    return known[key]


def tool_schema(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    about = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
    return {"type": "function", "function": about}


@dataclass(frozen=True)
class _Frame:
    """What a template writes before and after a text from outside; with ``as_json`` the text is a JSON string."""

    before: str
    after: str
    as_json: bool

    def fill(self, text: str) -> str:
        body = json.dumps(text, ensure_ascii=False)[1:-1] if self.as_json else text
        return self.before + body + self.after


class ChatCodec:
    """The tokens of tool calls, with the methods of ``TagCodec``.

    Raises:
        UserError: the template renders calls in a form that ``turns.tool_calls`` does not know, or cannot render a
            dialogue. A template that knows no calls gets them as text (``calls_as_content``).
    """

    stop: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        self._tokenizer: Any = tokenizer
        self._tools = {tool.name: tool for tool in tools}
        self._control = control_tokens(tokenizer)
        self._schemas = [self._control.harmless(tool_schema(tool)) for tool in tools]
        self._specials = self._control.special_ids
        self._replies: dict[str, _Frame] = {}
        self._plain = False
        self._plain = not self._renders_calls()
        answer_end, self._correction = self._find_correction()
        syntax, call_end = None, answer_end
        for name in self._tools:
            syntax, call_end, self._replies[name] = self._find_reply(name)
        self._syntax = syntax
        self.format: TurnFormat = ToolCallFormat(syntax)
        self._answer_end, self._call_end = self._specials[answer_end], self._specials[call_end]
        also, stray = (
            [self._specials[text] for text in texts if text in self._specials]
            for texts in (_ALSO_ENDS, _STRAY_ENDS)
        )
        self.stop_ids = tuple(dict.fromkeys([self._answer_end, self._call_end, *also]))
        self._ends = {*self.stop_ids, *stray, self._tokenizer.eos_token_id}
        self._prompts: dict[str | None, _Frame] = {}

    def prompt_ids(self, prompt: str, system_prompt: str | None) -> list[int]:
        """The token ids of the first message, up to where the policy writes."""
        if system_prompt not in self._prompts:
            self._prompts[system_prompt] = self._find_prompt(system_prompt)
        return self._encode(self._prompts[system_prompt], prompt.strip())

    def turn_text(self, ids: Sequence[int]) -> str:
        """The message without the token that ends it."""
        message = ids[:-1] if ids and ids[-1] in self._ends else ids
        return valid_text(self._tokenizer.decode(message, skip_special_tokens=False)).strip()

    def reply_ids(
        self, ids: Sequence[int], parsed: ParsedTurn | None, observation: str, max_tokens: int
    ) -> list[int]:
        """A tool's reply, or a user's message after a malformed turn. A message that did not end is ended first."""
        called = parsed.tool if parsed is not None and parsed.kind == "tool" else None
        frame = self._correction if called is None else self._replies[called]
        right_end = self._answer_end if called is None else self._call_end
        ended = bool(ids) and ids[-1] in self.stop_ids
        if called is not None and ended and self._call_end != self._answer_end:
            ended = ids[-1] == self._call_end  # Gemma's call ends with the token that begins the reply
        end = [] if ended else [right_end]
        return end + self._cut(self._with_id(frame, ids), observation.strip(), max_tokens)

    def written_turn(self, parsed: ParsedTurn, text: str) -> tuple[str, list[int]]:
        """A turn of the expert as the template writes it, with the token that ends it.

        Templates take reasoning from a field of its own, or as a part of the content; some drop it beside a call, and
        then the demonstration has none.

        Raises:
            UserError: the template does not continue its own prompt with the message.
        """
        called = parsed.kind == "tool" and parsed.tool is not None
        harmless = self._control.harmless
        parsed = parsed._replace(think=harmless(parsed.think), content=harmless(parsed.content))
        message: dict[str, Any] = {"role": "assistant", "content": "" if called else parsed.content}
        if called:
            arguments = arguments_of(self._tools[parsed.tool or ""], parsed.content)
            message["tool_calls"] = [_call(parsed.tool or "", arguments)]
        ways = [message]
        if parsed.think:
            thought = f"<think>\n{parsed.think}\n</think>\n\n"
            as_field = {"reasoning_content": parsed.think, "reasoning": parsed.think}
            ways = [{**message, **as_field}, {**message, "content": thought + message["content"]}, message]
        for number, way in enumerate(ways, start=1):
            last = number == len(ways)
            body = self._write(way, exact=not last)
            if body is None:
                continue
            ids = self._ended(body, self._call_end if called else self._answer_end)
            text = self.turn_text(ids)
            seen = parse_message(text, tuple(self._tools.values()), self._syntax)
            same = (seen.kind, seen.tool, seen.content) == (parsed.kind, parsed.tool, parsed.content)
            if same and (last or seen.think.split() == parsed.think.split()):
                return text, ids
        raise _refused(f"writes a demonstration as {quoted(text, 200)}, which is not what the expert did")

    def _write(self, message: Mapping[str, Any], *, exact: bool) -> str | None:
        """What the template writes for a message of the policy after its own prompt.

        None if it does not continue the prompt and ``exact`` is asked for. Otherwise the message begins where it leaves
        the prompt, such as after ``<think>`` where the prompt goes on with a line break.
        """
        asked = [{"role": "user", "content": "?"}]
        begun = self._render(asked, open_turn=True)
        whole = self._render([*asked, message])
        if whole.startswith(begun):
            return whole[len(begun) :]
        if exact:
            return None
        differ = (i for i, (one, other) in enumerate(zip(begun, whole, strict=False)) if one != other)
        at = next(differ, min(len(begun), len(whole)))
        return whole[self._control.start_of(whole, at) :]

    def _ended(self, text: str, end: int) -> list[int]:
        """The tokens of a message up to the token that ends it, which may be followed by others or be missing."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        stop = next((at for at, token in enumerate(ids) if token in (end, self._answer_end)), len(ids))
        return [*ids[:stop], end]

    # -- what the template writes --------------------------------------------------------------------------------
    def _renders_calls(self) -> bool:
        """Whether the template has a place for calls; some write nothing for them, and some fail."""
        try:
            return _ARGUMENT in self._render(_dialogue(next(iter(self._tools), "tool")))
        except UserError:
            return False

    def _find_prompt(self, system_prompt: str | None) -> _Frame:
        messages = [{"role": "user", "content": _MARK}]
        if system_prompt:
            messages.insert(0, {"role": "system", "content": self._control.harmless(system_prompt)})
        return _frame(self._render(messages, open_turn=True), "a user's message")

    def _find_correction(self) -> tuple[str, _Frame]:
        """The token that ends an answer, and what surrounds a user's message after it.

        It is rendered without tools, which some templates list before the newest user message; Hermes' needs them.
        """
        said = "sorl answer"
        texts = (("user", "?"), ("assistant", said), ("user", _MARK))
        messages = [{"role": role, "content": text} for role, text in texts]
        try:
            text = self._render(messages, open_turn=True, tools=False)
        except UserError:
            text = self._render(messages, open_turn=True)
        end, rest = self._after_end(text, said, "")
        return end, _frame(rest, "a second user's message")

    def _find_reply(self, tool: str) -> tuple[Syntax, str, _Frame]:
        """The form of a call, the token that ends it, and what surrounds the tool's reply."""
        reply = {"role": "tool", "name": tool, "tool_call_id": _CALL_ID, "content": _MARK}
        messages = [*_dialogue(tool), reply]
        begun = self._render(messages[:1], open_turn=True)
        text = self._render(messages, open_turn=True)
        start = len(begun if text.startswith(begun) else self._render(messages[:1]))
        at = text.find(_ARGUMENT)
        for syntax in SYNTAXES.values():
            end, rest = self._after_end(text, _ARGUMENT, syntax.close)
            message = text[start : len(text) - len(rest)].removesuffix(end)
            for _, closing in REASONING_MARKERS:
                message = message.rpartition(closing)[2] if closing in message else message
            try:
                found = read_call(message.strip(), syntax)
            except CallError:
                continue
            if found is not None and found[1].name == tool and found[1].arguments == {"sorl": _ARGUMENT}:
                return syntax, end, _frame(rest, "a tool's reply")
        raise _refused(
            f"renders a tool call as {text[at - 60 : at + 40]!r}, in none of the forms that are known here "
            f"({', '.join(SYNTAXES)})"
        )

    def _after_end(self, text: str, said: str, close: str) -> tuple[str, str]:
        """The first special token after what the assistant said, and after ``close``, and the text behind it."""
        start = text.find(said)
        if start < 0:
            raise _refused("drops the assistant's messages")
        closed = text.find(close, start) if close else start
        start = start if closed < 0 else closed + len(close)
        ends = [token for token in self._specials if token in text[start:]]
        if not ends:
            raise _refused(
                "ends a message of the assistant without a special token, so nothing tells the sampler to stop"
            )
        at, _, token = min((text.find(token, start), -len(token), token) for token in ends)
        return token, text[at + len(token) :]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, open_turn: bool = False, tools: bool = True
    ) -> str:
        from jinja2.exceptions import TemplateError

        schemas = self._schemas if tools else []
        if self._plain:
            messages, schemas = calls_as_content(messages, schemas), []
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=schemas or None, tokenize=False, add_generation_prompt=open_turn
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise _refused(f"cannot render messages of the roles {roles} with tools ({error})") from error
        return valid_text(text)

    # -- tokens --------------------------------------------------------------------------------------------------
    def _with_id(self, frame: _Frame, ids: Sequence[int]) -> _Frame:
        """The frame with the id that the policy gave its call, where the template repeats it."""
        if _CALL_ID not in frame.before + frame.after:
            return frame
        try:
            found = read_call(self.turn_text(ids), self._syntax)
        except CallError:
            found = None
        given = _CALL_ID if found is None or found[1].id is None else found[1].id
        before, after = (text.replace(_CALL_ID, given) for text in (frame.before, frame.after))
        return _Frame(before, after, frame.as_json)

    def _cut(self, frame: _Frame, text: str, max_tokens: int) -> list[int]:
        """The filled frame in at most ``max_tokens``; of a longer text only the beginning is kept."""
        whole = self._encode(frame, text)
        if len(whole) <= max_tokens:
            return whole

        def size(length: int) -> int:
            return len(self._encode(frame, text[:length].rstrip()))

        fits = bisect.bisect_right(range(len(text)), max_tokens, key=size)
        return self._encode(frame, text[: max(0, fits - 1)].rstrip())

    def _encode(self, frame: _Frame, text: str) -> list[int]:
        """Token ids of the frame around ``text``. Control tokens come from the frame alone, never from the text."""
        whole = frame.fill(self._control.harmless(valid_text(text)))
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=False)
        return ids


def _frame(text: str, what: str) -> _Frame:
    """The template's text around the only placeholder in it."""
    escaped = json.dumps(_MARK)[1:-1]
    for mark, as_json in ((_MARK, False), (escaped, True)):
        before, found, after = text.partition(mark)
        if found and mark not in after:
            return _Frame(before, after, as_json)
    raise _refused(f"does not render {what} exactly once, as it is or as JSON")


def _refused(problem: str) -> UserError:
    return UserError(f"the chat template {problem}: use format tags, or another model")


def _dialogue(tool: str) -> list[dict[str, Any]]:
    """A user's message, and the assistant's with a call of the tool."""
    call = _call(tool, {"sorl": _ARGUMENT})
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": _CALL_ID, "type": "function", "function": {"name": tool, "arguments": dict(arguments)}}
