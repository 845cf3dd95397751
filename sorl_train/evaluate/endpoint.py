"""A sampler that asks any server with OpenAI's ``/v1/completions``: vLLM, SGLang, llama.cpp, and others.

With a tokenizer the prompt is sent as the token ids that a local model would get. Without one it is sent as text, no
chat template is applied, and counts of tokens are estimates (`TextTokenizer`).

Requests ask for two of vLLM's extensions, which other servers ignore: the stop string as a part of the output, and the
ids of the sampled tokens. If a server leaves the stop string out, it is added again: the one that the server names, as
vLLM and SGLang do, or else the one that closes the open block.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from sorl_env.errors import UserError
from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_env.text import read_json
from sorl_env.turns.tokens import Tokenizer

_SEED_BITS = 0x7FFFFFFF  # servers take 32-bit seeds
_ENDED_BY = ("stop_reason", "matched_stop")  # where vLLM and SGLang say what ended a text
_BACKOFF_S, _LONGEST_WAIT_S = 0.5, 30.0


class TextTokenizer:
    """Replaces a tokenizer where none is given: it cuts text into pieces of up to four characters, about a token each.
    ``decode(encode(text)) == text`` holds; only the counts of tokens are estimates."""

    chat_template = None
    eos_token_id = None
    _PIECE = re.compile(r" ?\w{1,4}|\s|[^\w\s]")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of the pieces; a new piece gets the next id."""
        ids = []
        for piece in self._PIECE.findall(text):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text again."""
        return "".join(self._pieces[i] for i in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Raises ``ValueError``: there is no chat template."""
        raise ValueError("a TextTokenizer has no chat template")


class EndpointSampler:
    """Implements ``sorl_env.rollout.Sampler``; see the module's docstring. Its log-probabilities are all 0. ``url``
    includes ``/v1``; ``timeout_s`` is for one request with its retries, because a model under load may take minutes for
    a turn; ``api_key`` is sent as a bearer token."""

    def __init__(
        self,
        url: str,
        model_name: str,
        tokenizer: Tokenizer,
        *,
        concurrency: int = 32,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.model_name = model_name
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EndpointSampler]:
        """Opens the connections of an evaluation, and closes them at its end."""
        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        async with httpx.AsyncClient(
            timeout=self._timeout_s, limits=limits, headers=self._headers
        ) as self._client:
            try:
                yield self
            finally:  # also after an error, so that the next evaluation does not use a closed client
                self._client = None

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Sample one turn (see ``Sampler.generate``). Raises ``UserError`` if the server refuses the request, or does
        not answer for ``timeout_s``."""
        as_text = isinstance(self._tokenizer, TextTokenizer)
        body = {
            "model": self.model_name,
            "prompt": self._tokenizer.decode(token_ids) if as_text else list(token_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p if params.temperature else 1.0,
            "stop": list(params.stop),
            "seed": params.seed & _SEED_BITS,
            "include_stop_str_in_output": True,
            "return_token_ids": not as_text,
        }
        if params.stop_ids:
            body |= {"stop_token_ids": list(params.stop_ids), "skip_special_tokens": False}
        choice = _choice(await self._post(body), self.url)
        finish = choice.get("finish_reason")
        text = str(choice["text"])
        if finish == "stop":
            text = with_stop_string(text, choice, params.stop)
        stopped = any(word in text for word in params.stop)
        drawn = choice.get("token_ids")
        ids = list(drawn) if drawn and not as_text else self._tokenizer.encode(text, add_special_tokens=False)
        if drawn and stopped and not any(word in self._tokenizer.decode(ids) for word in params.stop):
            ids = self._tokenizer.encode(text, add_special_tokens=False)  # ids without the stop string
        kind = "length" if finish == "length" else "stop" if stopped else "eos"
        return SampledTurn(ids, [0.0] * len(ids), kind)  # type: ignore[arg-type]

    def release(self, session: str) -> None:
        """Servers keep no sessions."""

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """The server's reply. What may pass (no connection, a timeout, 429, 5xx) is retried until the deadline."""
        assert self._client is not None, "use it inside session()"
        deadline = time.monotonic() + self._timeout_s
        wait = _BACKOFF_S
        while True:
            after = None
            try:
                reply = await self._client.post(f"{self.url}/completions", json=body)
                if reply.status_code < 400:
                    return reply
                problem = f"HTTP {reply.status_code}: {reply.text[:300].strip()}"
                if reply.status_code != 429 and reply.status_code < 500:
                    raise UserError(f"{self.url} refused a request of model {self.model_name!r}: {problem}")
                seconds = reply.headers.get("retry-after", "")
                after = float(seconds) if seconds.isdigit() else None
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            pause = min(after or wait, _LONGEST_WAIT_S)
            if time.monotonic() + pause >= deadline:
                raise UserError(
                    f"{self.url} has not answered for {self._timeout_s:g} s ({problem}); the answers so far are kept: "
                    "start the server and give the same command again"
                )
            await asyncio.sleep(pause)
            wait *= 2


def with_stop_string(text: str, choice: Mapping[str, Any], stop: Sequence[str]) -> str:
    """``text`` with the stop string that ended it, if the server left it out.

    If the server says what ended the text and it is none of ``stop``, that was an end-of-text token. Then nothing is
    added, even if a block is open.

    >>> with_stop_string("<think>so</think><search>who", {}, ("</search>", "</answer>"))
    '<think>so</think><search>who</search>'
    """
    if any(word in text for word in stop):
        return text
    told = [choice[name] for name in _ENDED_BY if name in choice]
    if told:
        return text + told[0] if told[0] in stop else text
    opened = {text.rfind(f"<{word[2:]}"): word for word in stop if word.startswith("</")}
    last = max(opened, default=-1)
    return text + opened[last] if last >= 0 else text


def _choice(reply: httpx.Response, url: str) -> Mapping[str, Any]:
    try:
        choice = read_json(reply.content)["choices"][0]
        choice["text"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        said = reply.text[:300].strip()
        raise UserError(
            f"{url}: this is not a reply of /v1/completions: {said!r}; correct --endpoint"
        ) from error
    return dict(choice)
