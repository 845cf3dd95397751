"""The protocol: the part of OpenAI's ``/v1/chat/completions`` that an agent for single questions can support.

The policy was trained on one question in its task's own prompt, so a request has one user message. Fields that would
change the answer but are not supported (a history, a system prompt, the client's tools) are refused, not ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_env.bounds import MAX_SEED
from sorl_env.errors import did_you_mean
from sorl_env.text import read_json
from sorl_env.trajectory import StopReason, Trajectory
from sorl_tools.http_server.errors import RequestError
from sorl_train.evaluate.results import final_answer, turn_facts

# Accepted without effect: they tell a provider who asks and what to store.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
# Clients send these with a value that asks for nothing; any other value is refused.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
}
_TAKEN = ("model", "messages", "temperature", "top_p", "seed", "stream", "stream_options", "sorl")
_LENGTHS = ("max_completion_tokens", "max_tokens")
_KNOWN = (*_TAKEN, *_LENGTHS, *IGNORED, *_NEUTRAL)


class ChatError(RequestError):
    """A request that is answered with OpenAI's error object.

    Attributes:
        param: the wrong field of the request.
        code: a word that programs can test.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, retry_after_s=5 if status in (502, 503) else None)
        self.param = param
        self.code = code


def error_content(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = getattr(error, "code", "invalid_api_key" if error.status == 401 else None)
    return {
        "error": {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": code}
    }


@dataclass(frozen=True)
class ChatRequest:
    """A client's question.

    Attributes:
        options: text by letter of a multiple-choice question; None for an open one.
        temperature, top_p, seed: None takes the server's.
        max_tokens: after the prompt, with the replies of tools; None takes the task's limit.
        stream: send the turns as they are sampled.
        include_usage: end the stream with a chunk that counts tokens.
    """

    question: str
    options: Mapping[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False


def parse_request(body: bytes, model: str) -> ChatRequest:
    """Read a request for the model that is served as ``model``.

    Raises:
        ChatError: it is malformed, or asks for something that is not supported.
    """
    try:
        fields = read_json(body)
    except ValueError as error:
        raise ChatError(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ChatError(400, "the body must be a JSON object")
    for name, value in fields.items():
        if name not in _KNOWN:
            raise ChatError(
                400, f"unknown parameter. {did_you_mean(name, _KNOWN)}", param=name, code="unknown_parameter"
            )
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise ChatError(
                400,
                f"{name}={json.dumps(value)[:80]}: this server does not support that; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    if fields.get("model") != model:
        raise ChatError(
            404,
            f"there is no model {fields.get('model')!r} here, only {model!r}",
            param="model",
            code="model_not_found",
        )
    stream = _flag(fields.get("stream"), "stream")
    lengths = [_number(fields, name, 1, 1 << 31, whole=True) for name in _LENGTHS]
    return ChatRequest(
        question=_question(fields.get("messages")),
        options=_options(fields.get("sorl")),
        temperature=_number(fields, "temperature", 0.0, 2.0),
        top_p=_number(fields, "top_p", 1e-6, 1.0),
        seed=_number(fields, "seed", 0, MAX_SEED, whole=True),
        max_tokens=min((length for length in lengths if length is not None), default=None),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
    )


def _question(messages: Any) -> str:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ChatError(400, "messages must be a list with one user message", param="messages")
    roles = [message.get("role") for message in messages]
    if roles != ["user"]:
        raise ChatError(
            400,
            f"messages have the roles {', '.join(map(str, roles))[:80]}: the policy answers one question in the prompt "
            "of its task, so send one user message, without a system message or a history",
            param="messages",
            code="unsupported_messages",
        )
    content = messages[0].get("content")
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        if any(not isinstance(text, str) for text in texts):
            raise ChatError(400, "message parts must be of type text", param="messages")
        content = "\n".join(texts)
    if not isinstance(content, str) or not content.strip():
        raise ChatError(400, "the user message has no text", param="messages")
    return content.strip()


def _options(extra: Any) -> Mapping[str, str] | None:
    """Read the field ``sorl``, which OpenAI's protocol does not have: ``{"options": {"A": "text", ..}}``."""
    if extra is None:
        return None
    if not isinstance(extra, dict) or extra.keys() - {"options"}:
        raise ChatError(400, 'sorl must be {"options": {"A": "text", ..}}', param="sorl")
    options = extra.get("options")
    if options is None:
        return None
    letters = isinstance(options, dict) and all(re.fullmatch("[A-J]", letter) for letter in options)
    if not letters or not options or not all(isinstance(text, str) and text for text in options.values()):
        raise ChatError(400, "sorl.options must map letters from A to J to texts", param="sorl")
    return dict(options)


def _number(fields: Mapping[str, Any], name: str, low: float, high: float, *, whole: bool = False) -> Any:
    """A number of the request, or None if it has none."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ChatError(400, f"{name}={value!r}: give {kind} from {low:g} to {high:g}", param=name)
    return value if whole else float(value)


def _flag(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ChatError(400, f"{name}={value!r}: give true or false", param=name)
    return bool(value)


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream or not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise ChatError(
            400, 'stream_options must be {"include_usage": true}, and needs stream', param="stream_options"
        )
    return _flag(options.get("include_usage"), "stream_options.include_usage")


# -- replies ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Head:
    """The first fields of all parts of one reply; ``created`` is in seconds since 1970."""

    id: str
    created: int
    model: str

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def reply(self, trajectory: Trajectory, unknown_words: Sequence[str]) -> dict[str, Any]:
        """A complete reply: the final answer is the message, the dialogue is in ``sorl``."""
        message = {"role": "assistant", "content": final_answer(trajectory), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(trajectory)}
        return {
            **self._fields("chat.completion"),
            "choices": [choice],
            "usage": usage(trajectory),
            "sorl": dialogue(trajectory, unknown_words),
        }

    def chunk(self, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """A part of a streamed reply that does not end it."""
        choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": None}
        return {**self._fields("chat.completion.chunk"), "choices": [choice], **more}

    def last_chunk(self, trajectory: Trajectory, unknown_words: Sequence[str]) -> dict[str, Any]:
        """The part that says how the dialogue ended, with the whole dialogue."""
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish(trajectory)}
        return {
            **self._fields("chat.completion.chunk"),
            "choices": [choice],
            "sorl": dialogue(trajectory, unknown_words),
        }

    def usage_chunk(self, trajectory: Trajectory) -> dict[str, Any]:
        """The part after the last one, with the counts of tokens."""
        return {**self._fields("chat.completion.chunk"), "choices": [], "usage": usage(trajectory)}


def usage(trajectory: Trajectory) -> dict[str, int]:
    """Counts of the tokens that the policy sampled, and of those that it read: the prompt and the tools' replies."""
    total, drawn = len(trajectory.token_ids), trajectory.num_action_tokens
    return {"prompt_tokens": total - drawn, "completion_tokens": drawn, "total_tokens": total}


def dialogue(trajectory: Trajectory, unknown_words: Sequence[str]) -> dict[str, Any]:
    """The dialogue as plain values: why it ended, and its turns (see `turn_facts`).

    Args:
        unknown_words: words of the question that a policy with a closed vocabulary could not read.
    """
    facts = {"stop_reason": trajectory.stop_reason.value, "seed": trajectory.seed}
    turns = [turn_facts(turn) for turn in trajectory.turns]
    return {**facts, "unknown_words": list(unknown_words), "turns": turns}


def _finish(trajectory: Trajectory) -> str:
    return "stop" if trajectory.stop_reason is StopReason.ANSWER else "length"
