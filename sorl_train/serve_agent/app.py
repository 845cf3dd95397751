"""The service as a Starlette application: ``/v1/chat/completions``, ``/v1/models`` and ``/health``."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sorl_tools.http_server.app import BUG, Guard, RequestError, make_app
from sorl_tools.http_server.options import ServerSettings
from sorl_train.evaluate.results import final_answer
from sorl_train.serve_agent.agent import Agent, Dialogue
from sorl_train.serve_agent.chat import (
    ChatRequest,
    chunk,
    dialogue_facts,
    error_content,
    finish_reason,
    parse_request,
    usage,
    whole_reply,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NO_STORE = {"cache-control": "no-store"}


def agent_app(agent: Agent, model: str, settings: ServerSettings = ServerSettings()) -> ASGIApp:
    """The application; ``model`` is the model's name in requests and replies."""
    started = int(time.time())

    async def complete(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a web page can post unasked is another one
            raise RequestError(415, f"content-type {kind[:60]!r}: send application/json")
        asked = parse_request(await request.body(), model)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        dialogue = await agent.prepare(asked)
        if asked.stream:
            return _EventStream(_events(agent, head, asked, dialogue))
        trajectory = await _while_connected(request, agent.answer(dialogue))
        if trajectory is None:
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(whole_reply(head, trajectory, dialogue.unknown_words), headers=_NO_STORE)

    async def models(request: Request) -> Response:
        entry = {"id": model, "object": "model", "created": started, "owned_by": "sorl"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(request: Request) -> Response:
        state = {
            "status": "failed" if agent.failed else "ok",
            "model": model,
            "task": agent.task,
            "in_flight": agent.in_flight,
            "waiting": agent.open - agent.in_flight,
        }
        return JSONResponse(state, 503 if agent.failed else 200)

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Guard(make_app(routes, error_content), settings, content=error_content)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None if the client leaves, which cancels it: its place is for another dialogue."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class _EventStream(StreamingResponse):
    """Server-sent events of a generator, which ends with the response, also when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_NO_STORE)
        self.headers["content-type"] = "text/event-stream"  # without a charset, as OpenAI sends it
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _events(
    agent: Agent, head: Mapping[str, Any], request: ChatRequest, dialogue: Dialogue
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a reply. An error after the first of them is sent as the last one."""
    happened: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_turn(turn: dict[str, Any]) -> None:  # on the agent's thread
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(happened.put_nowait, turn)

    def ended(answering: asyncio.Future[Any]) -> None:
        happened.put_nowait(None)
        if not answering.cancelled():
            answering.exception()  # seen, also if the client has left

    answering = asyncio.ensure_future(agent.answer(dialogue, on_turn))
    answering.add_done_callback(ended)
    try:
        yield _event(chunk(head, {"role": "assistant", "content": ""}))
        while (turn := await happened.get()) is not None:
            yield _event(chunk(head, {}, sorl={"turn": turn}))
        trajectory = answering.result()
        answer = final_answer(trajectory)
        if answer is not None:
            yield _event(chunk(head, {"content": answer}))
        told = dialogue_facts(trajectory, dialogue.unknown_words)
        yield _event(chunk(head, {}, finish_reason(trajectory), sorl=told))
        if request.stream_options.include_usage:
            yield _event({**chunk(head, {}), "choices": [], "usage": usage(trajectory)})
    except RequestError as error:
        yield _event(error_content(error))
    except Exception:
        logger.exception("a bug: a streamed dialogue raised")
        yield _event(error_content(RequestError(500, BUG)))
    finally:
        answering.cancel()
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
