"""The service as an ASGI application: a chat page, ``/v1/chat/completions``, ``/v1/models`` and ``/health``.

It is plain ASGI on uvicorn, because a framework is not worth it for four routes (see ``sorl_tools.serve.app``).
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from sorl_train.evaluate.results import final_answer
from sorl_train.report.page import render_page
from sorl_train.serve_agent.agent import Agent
from sorl_train.serve_agent.chat import ChatRequest, Head, RequestError, parse_request

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 1 << 20
_METHODS = {"/": "GET", "/v1/chat/completions": "POST", "/v1/models": "GET", "/health": "GET"}
_BUG = "a bug in the server; its log has the traceback"
_DONE = b"data: [DONE]\n\n"


class _GoneError(Exception):
    """The client disconnected, so nobody reads a reply."""


def chat_page(agent: Agent, model: str, *, needs_token: bool) -> bytes:
    """The page at ``/``. Where a token is needed it shows none of the task's questions to those who lack it."""
    examples = agent.examples(3)
    data = {
        "model": model,
        "task": agent.task,
        "tools": agent.tools,
        "needs_token": needs_token,
        "needs_options": any(example.options for example in examples),
        "examples": []
        if needs_token
        else [{"question": example.question, "options": example.options} for example in examples],
    }
    page = render_page(
        "chat.html.j2",
        styles=["page.css", "dialogue.css", "chat.css"],
        scripts=["page.js", "chat.js"],
        title=model,
        data=data,
    )
    return page.encode()


class App:
    """The application.

    Args:
        model: the model's name in requests and replies.
        token: if given, all routes but ``/health`` and the page, which asks for it, require ``Authorization: Bearer
            TOKEN``.
        body_timeout_s: time for the whole body of a request to arrive; after that the answer is 408.
    """

    def __init__(
        self, agent: Agent, model: str, *, token: str | None = None, body_timeout_s: float = 10.0
    ) -> None:
        self._agent = agent
        self._model = model
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._body_timeout_s = body_timeout_s
        self._refused: collections.Counter[str] = collections.Counter()
        self._started = int(time.time())
        self._page = chat_page(agent, model, needs_token=token is not None)

    def refused(self, reason: str) -> None:
        """Count a connection that was closed for one of `sorl_tools.serve.connections.REFUSALS`."""
        self._refused[reason] += 1

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not supported")
        try:
            await self._route(scope, receive, send)
        except _GoneError:
            return
        except RequestError as error:
            await _send_json(send, error.content, error.status)
        except Exception:
            logger.exception("a bug: %s raised", scope["path"])
            await _send_json(send, RequestError(500, _BUG).content, 500)

    async def _route(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        method = _METHODS.get(path)
        if method is None:
            raise RequestError(404, f"there is no {path[:100]}; use {', '.join(_METHODS)}")
        if scope["method"] != method:
            raise RequestError(405, f"{path} takes {method}")
        if path == "/health":
            await _send_json(send, self._health(), 503 if self._agent.failed else 200)
            return
        if path == "/":
            await _send(send, self._page, b"text/html; charset=utf-8")
            return
        self._check_token(headers)
        if path == "/v1/models":
            model = {"id": self._model, "object": "model", "created": self._started, "owned_by": "sorl"}
            await _send_json(send, {"object": "list", "data": [model]})
            return
        body = await _read_body(headers, receive, self._body_timeout_s)
        request = parse_request(body, self._model)
        head = Head(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), self._model)
        answering = self._stream if request.stream else self._reply
        await _while_connected(answering(head, request, send), receive)

    def _health(self) -> dict[str, Any]:
        agent = self._agent
        waiting = agent.open - agent.in_flight
        return {
            "status": "failed" if agent.failed else "ok",
            "model": self._model,
            "task": agent.task,
            "in_flight": agent.in_flight,
            "waiting": waiting,
            "refused_connections": dict(self._refused),
        }

    def _check_token(self, headers: dict[bytes, bytes]) -> None:
        if self._authorization is None:
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, self._authorization):
            said = "wrong token" if given else "send Authorization: Bearer TOKEN"
            raise RequestError(401, said, code="invalid_api_key")

    async def _reply(self, head: Head, request: ChatRequest, send: Send) -> None:
        dialogue = await self._agent.prepare(request)
        trajectory = await self._agent.answer(dialogue)
        await _send_json(send, head.reply(trajectory, dialogue.unknown_words))

    async def _stream(self, head: Head, request: ChatRequest, send: Send) -> None:
        """Answer with server-sent events. An error after the first of them is sent as the last one."""
        dialogue = await self._agent.prepare(request)
        happened: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_event(event: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(happened.put_nowait, event)

        answering = asyncio.ensure_future(self._agent.answer(dialogue, on_event))
        try:
            await _start(send, 200, b"text/event-stream")
            await _event(send, head.chunk({"role": "assistant", "content": ""}))
            async for event in _until(happened, answering):
                await _event(send, head.chunk({}, sorl=event))
            try:
                trajectory = answering.result()
                answer = final_answer(trajectory)
                if answer is not None:
                    await _event(send, head.chunk({"content": answer}))
                await _event(send, head.last_chunk(trajectory, dialogue.unknown_words))
                if request.include_usage:
                    await _event(send, head.usage_chunk(trajectory))
            except RequestError as error:
                await _event(send, error.content)
            except Exception:
                logger.exception("a bug: a streamed dialogue raised")
                await _event(send, RequestError(500, _BUG).content)
            await send({"type": "http.response.body", "body": _DONE})
        finally:
            answering.cancel()


async def _until(
    happened: asyncio.Queue[dict[str, Any]], answering: asyncio.Future[Any]
) -> AsyncIterator[dict[str, Any]]:
    """All events of ``happened`` until ``answering`` is done and the queue is empty."""
    while not answering.done() or not happened.empty():
        event = asyncio.ensure_future(happened.get())
        await asyncio.wait({event, answering}, return_when=asyncio.FIRST_COMPLETED)
        if event.done():
            yield event.result()
        else:
            event.cancel()


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work``, but cancel it if the client disconnects, to free its place for another dialogue."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _GoneError
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(headers: dict[bytes, bytes], receive: Receive, timeout_s: float) -> bytes:
    length = headers.get(b"content-length", b"")
    too_large = RequestError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    deadline = time.monotonic() + timeout_s  # for the whole body, however slowly it arrives
    try:
        while True:
            message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.0))
            if message["type"] == "http.disconnect":
                raise _GoneError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body"):
                return b"".join(chunks)
    except asyncio.TimeoutError:
        raise RequestError(408, f"the body did not arrive within {timeout_s:g} s") from None


async def _start(send: Send, status: int, content_type: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", content_type), (b"cache-control", b"no-store")]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 408:
        headers.append((b"connection", b"close"))  # the rest of the body is not a request
    if status in (502, 503):
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_json(send: Send, content: Any, status: int = 200) -> None:
    await _send(send, json.dumps(content).encode(), b"application/json", status)


async def _send(send: Send, body: bytes, content_type: bytes, status: int = 200) -> None:
    await _start(send, status, content_type, len(body))
    await send({"type": "http.response.body", "body": body})


async def _event(send: Send, content: Any) -> None:
    await send(
        {
            "type": "http.response.body",
            "body": b"data: " + json.dumps(content).encode() + b"\n\n",
            "more_body": True,
        }
    )
