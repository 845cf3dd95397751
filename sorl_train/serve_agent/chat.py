"""The protocol: the part of OpenAI's ``/v1/chat/completions`` that an agent for single questions can support.

The policy was trained on one question in its task's own prompt, so a request has one user message. Fields that would
change the answer but are not supported (a history, a system prompt, the client's tools) are refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sorl_env.errors import MAX_SEED, did_you_mean
from sorl_env.text import read_json
from sorl_env.trajectory import StopReason, Trajectory
from sorl_tools.http_server.app import RequestError
from sorl_train.evaluate.results import final_answer, turn_facts

# Accepted without effect: they tell a provider who asks and what to store.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
_Letter = Annotated[str, Field(pattern="^[A-J]$")]
_Text = Annotated[str, Field(min_length=1)]
_Empty = Annotated[list[Any], Field(max_length=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Model):
    include_usage: bool = False


class _Options(_Model):
    options: Annotated[dict[_Letter, _Text], Field(min_length=1)] | None = None


class _TextPart(_Model):
    type: Literal["text"]
    text: str


class _Message(_Model):
    role: Literal["user"]
    content: str | list[_TextPart]
    name: str | None = None


class _Neutral(_Model):
    """What clients send with a value that asks for nothing; any other value is refused."""

    n: Literal[1] | None = None
    stop: _Empty | None = None
    tools: _Empty | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None


class ChatRequest(_Neutral):
    """A client's question; ``sorl`` is not of OpenAI's protocol. None takes the server's value, or the task's limit."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, max_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions = _StreamOptions()
    sorl: _Options = _Options()

    @property
    def question(self) -> str:
        """The text of the request's one message."""
        content = self.messages[0].content
        return (content if isinstance(content, str) else "\n".join(part.text for part in content)).strip()

    @property
    def token_limit(self) -> int | None:
        """After the prompt, with the replies of tools."""
        lengths = [self.max_completion_tokens, self.max_tokens]
        return min((length for length in lengths if length is not None), default=None)


class ChatError(RequestError):
    """A request that is answered with OpenAI's error object: the wrong field, and a word that programs can test."""

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


def parse_request(body: bytes, model: str) -> ChatRequest:
    """Read a request for ``model``. Raises ChatError if it is malformed or asks for what is not supported."""
    try:
        fields = read_json(body)
    except ValueError as error:
        raise ChatError(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ChatError(400, "the body must be a JSON object")
    if fields.get("model") != model:
        said = f"there is no model {fields.get('model')!r} here, only {model!r}"
        status = 404 if isinstance(fields.get("model"), str) else 400
        raise ChatError(status, said, param="model", code="model_not_found")
    try:
        given = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
        asked = ChatRequest.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None
    if "stream_options" in given and not asked.stream:
        raise ChatError(400, "stream_options needs stream", param="stream_options")
    if not asked.question:
        raise ChatError(400, "the user message has no text", param="messages")
    return asked


def _refusal(first: Mapping[str, Any]) -> ChatError:
    name = str(first["loc"][0])
    if name not in ChatRequest.model_fields:
        known = (*ChatRequest.model_fields, *IGNORED)
        said = f"unknown parameter. {did_you_mean(name, known)}"
        return ChatError(400, said, param=name, code="unknown_parameter")
    if name in _Neutral.model_fields:
        said = f"{name}={first['input']!r:.80}: this server does not support that; leave it out"
        return ChatError(400, said, param=name, code="unsupported_parameter")
    if name == "messages":
        said = (
            "the policy answers one question in the prompt of its task, so send one user message of text, without a "
            f"system message or a history ({first['msg']})"
        )
        return ChatError(400, said, param=name, code="unsupported_messages")
    where = ".".join(str(part) for part in first["loc"])
    return ChatError(400, f"{where}={first['input']!r:.80}: {first['msg']}", param=name)


# -- replies ---------------------------------------------------------------------------------------------------
def whole_reply(
    head: Mapping[str, Any], trajectory: Trajectory, unknown_words: Sequence[str]
) -> dict[str, Any]:
    """A complete reply: the final answer is the message, the dialogue is in ``sorl``. ``head`` has ``id``, ``created``
    (seconds since 1970) and ``model``, as in all parts of one reply; ``unknown_words`` are those of the question that a
    policy with a closed vocabulary could not read."""
    message = {"role": "assistant", "content": final_answer(trajectory), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(trajectory)}
    told = {"usage": usage(trajectory), "sorl": dialogue_facts(trajectory, unknown_words)}
    return {**head, "object": "chat.completion", "choices": [choice], **told}


def chunk(
    head: Mapping[str, Any], delta: Mapping[str, Any], finish: str | None = None, **more: Any
) -> dict[str, Any]:
    """A part of a streamed reply; ``finish`` says why it is the last one."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**head, "object": "chat.completion.chunk", "choices": [choice], **more}


def usage(trajectory: Trajectory) -> dict[str, int]:
    """Counts of the tokens that the policy sampled, and of those that it read: the prompt and the tools' replies."""
    total, drawn = len(trajectory.token_ids), trajectory.num_action_tokens
    return {"prompt_tokens": total - drawn, "completion_tokens": drawn, "total_tokens": total}


def dialogue_facts(trajectory: Trajectory, unknown_words: Sequence[str]) -> dict[str, Any]:
    """The dialogue as plain values: why it ended, and its turns (see `turn_facts`)."""
    facts = {"stop_reason": trajectory.stop_reason.value, "seed": trajectory.seed}
    turns = [turn_facts(turn) for turn in trajectory.turns]
    return {**facts, "unknown_words": list(unknown_words), "turns": turns}


def finish_reason(trajectory: Trajectory) -> str:
    """OpenAI's word for why it ended."""
    return "stop" if trajectory.stop_reason is StopReason.ANSWER else "length"
