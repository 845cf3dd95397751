"""A client of OpenEnv's protocol: JSON messages over a WebSocket, one connection for each episode.

It needs the package ``websockets`` only. OpenEnv's own client belongs to a package that brings 70 others, a web
interface among them, and reads replies of up to 100 MB; the protocol is four kinds of messages.

OpenEnv gives a text, a reward and ``done``. ``sorl-serve-env`` also says how the policy's turn was read, what each
reward is for, which tools were called, and whether an episode ended because a tool was out. All of this goes into the
metadata of an observation, under ``KEY``. Other clients need not read it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from sorl_env.bridges.session_env import Reply
from sorl_env.envs.step import TurnInfo
from sorl_env.envs.text_env import TextEnv
from sorl_env.task.task import Example
from sorl_env.text import quoted, read_json
from sorl_env.tool.tool import ToolCall, ToolInputError, ToolUnavailableError
from sorl_env.trajectory.trajectory import StopReason
from sorl_env.turns.tags import FormatError, ParsedTurn

KEY = "sorl"
PROTOCOL = 1
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between two attempts to connect
_CONNECT_S = 10.0
_MAX_ERROR_CHARS = 1000
_MAX_REPLY_BYTES = 4 << 20  # longer replies are refused

ToAction = Callable[[str], Mapping[str, Any]]


def facts_of(env: TextEnv, splits: tuple[str, ...]) -> dict[str, Any]:
    """What a client has to know of a task before its first episode, as JSON values."""
    return {
        "protocol": PROTOCOL,
        "task": env.task.name,
        "description": env.task.description,
        "system_prompt": env.task.system_prompt,
        "stop": list(env.stop),
        "limits": dataclasses.asdict(env.limits),
        "splits": list(splits),
    }


def result_to_json(result: TurnInfo) -> dict[str, Any]:
    """A turn's result without its observation and reward, as JSON values."""
    return {
        "terminated": result.terminated,
        "truncated": result.ended and not result.terminated,
        "parsed": None if result.parsed is None else result.parsed._asdict(),
        "reward_items": result.reward_items,
        "tool_calls": [call._asdict() for call in result.tool_calls],
        "stop_reason": None if result.stop_reason is None else result.stop_reason.value,
        "error": result.error,
    }


def _reply_from_json(text: str, reward: float, record: Mapping[str, Any]) -> Reply:
    """Inverse of ``result_to_json``. Raises ValueError, TypeError or KeyError for a record of another form."""
    parsed, reason = record["parsed"], record["stop_reason"]
    if parsed is not None:
        error = parsed["error"]
        parsed = ParsedTurn(**{**parsed, "error": None if error is None else FormatError(error)})
    return Reply(
        text,
        reward,
        terminated=record["terminated"] is True,
        truncated=record["truncated"] is True,
        parsed=parsed,
        reward_items={str(name): float(value) for name, value in record["reward_items"].items()},
        tool_calls=[ToolCall(**call) for call in record["tool_calls"]],
        stop_reason=None if reason is None else StopReason(reason),
        error=record["error"],
    )


@dataclass(frozen=True)
class Server:
    """An OpenEnv server, and how its actions and observations become text.

    Attributes:
        url: as ``http://127.0.0.1:8303``.
        is_sorl: it is ``sorl-serve-env``, and its metadata says all that our own environment would.
        to_action: makes an action of a text; raises ``ToolInputError`` where it cannot.
        to_text: the text of an observation.
        timeout_s: for one message and its reply.
        wait_s: for a place on a server that is full, or for one that is being restarted, at the beginning of an
            episode.
    """

    url: str
    is_sorl: bool
    to_action: ToAction
    to_text: Callable[[Mapping[str, Any]], str]
    timeout_s: float
    wait_s: float
    token: str | None = field(default=None, repr=False)


class _FullError(Exception):
    """The server has no place for another episode."""


_LOST = (OSError, WebSocketException, asyncio.TimeoutError, _FullError)


class OpenEnvSession:
    """One episode on a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: ClientConnection | None = None

    async def reset(self, example: Example, seed: int) -> tuple[str, Example]:
        """Connect and start an episode; waits where the server is full or does not answer yet."""
        server, place = self._server, example.metadata
        data = {name: place[name] for name in ("split", "index") if name in place}
        data["seed"] = seed if server.is_sorl else place.get("seed", place.get("index", 0))
        deadline, wait = time.monotonic() + server.wait_s, _FIRST_WAIT_S
        while True:
            try:
                await self._connect()
                reply, record = await self._ask("reset", data)
                break
            except ToolInputError as error:
                raise self._unavailable("it begins no episode", error) from error
            except _LOST as error:
                self.close()
                if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403):
                    raise self._unavailable("it refuses the token", error) from error
                if time.monotonic() + wait > deadline:
                    raise self._unavailable(f"no episode began within {server.wait_s:g} s", error) from error
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)
        known = record.get("example")
        if server.is_sorl and isinstance(known, dict):
            name, question = str(known.get("id", example.id)), str(known.get("question", ""))
            example = dataclasses.replace(example, id=name, question=question)
        return reply.text, example

    async def _connect(self) -> None:
        server = self._server
        scheme, _, rest = server.url.partition("://")
        self._connection = await connect(
            f"{'wss' if scheme == 'https' else 'ws'}://{rest}/ws",
            additional_headers={} if server.token is None else {"Authorization": f"Bearer {server.token}"},
            compression=None,  # so that no small message becomes a large one
            max_size=_MAX_REPLY_BYTES,
            open_timeout=min(_CONNECT_S, server.timeout_s),
            ping_interval=None,  # each message has its own deadline
            close_timeout=1.0,
        )

    async def step(self, action: str) -> Reply:
        """Play an action."""
        return await self._step(self._server.to_action(action))

    async def truncate(self, reason: StopReason) -> Reply | None:
        """Ask a server of our own for the reward of an episode that ends here; others have no such message."""
        if not self._server.is_sorl:
            return None
        return await self._step({"message": "", "truncate": reason.value})

    async def _step(self, action: Mapping[str, Any]) -> Reply:
        try:
            reply, record = await self._ask("step", action)
        except _LOST as error:
            raise self._unavailable("the episode was lost", error) from error
        if self._server.is_sorl:
            try:
                return _reply_from_json(reply.text, reply.reward, record)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise self._unavailable("its metadata cannot be read", error) from error
        is_cut = reply.terminated and record.get("truncated") is True
        return dataclasses.replace(reply, terminated=reply.terminated and not is_cut, truncated=is_cut)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[Reply, Mapping[str, Any]]:
        """Send a message; returns the observation that answers it, and what its metadata say."""
        assert self._connection is not None
        connection = self._connection
        message = json.dumps({"type": kind, "data": dict(data)})

        async def exchange() -> str | bytes:
            await connection.send(message)
            return await connection.recv()

        text = await asyncio.wait_for(exchange(), self._server.timeout_s)
        try:
            answer = read_json(text)
        except ValueError as error:
            raise self._unavailable("its reply cannot be read", error) from error
        if not isinstance(answer, dict) or not isinstance(found := answer.get("data"), dict):
            raise self._unavailable(f"its reply is not a message of OpenEnv: {quoted(str(answer))}")
        if answer.get("type") == "error":
            raise self._refusal(found)
        if answer.get("type") != "observation":
            raise self._unavailable(
                f"its reply is of type {quoted(str(answer.get('type')))}, not observation"
            )
        return self._read(found)

    def _refusal(self, data: Mapping[str, Any]) -> Exception:
        code, said = data.get("code"), quoted(str(data.get("message")), _MAX_ERROR_CHARS)
        if code == "CAPACITY_REACHED":
            return _FullError(said)
        if code == "VALIDATION_ERROR":  # the policy wrote an action of another form
            wrong = str(data.get("errors") or said)[:300]
            return ToolInputError(f"This action is not possible here: {wrong}")
        return self._unavailable(f"it says {quoted(str(code))}: {said}")

    def _read(self, data: Mapping[str, Any]) -> tuple[Reply, Mapping[str, Any]]:
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise self._unavailable("its observation has another form")
        if reward is not None and (not isinstance(reward, (int, float)) or not math.isfinite(reward)):
            raise self._unavailable(f"it gave a reward of {quoted(str(reward))}")
        metadata = observation.get("metadata")
        record: Any = metadata if isinstance(metadata, dict) else {}
        if self._server.is_sorl and not isinstance(record := record.get(KEY), dict):
            raise self._unavailable(f"its metadata lacks {KEY!r}")
        return Reply(self._server.to_text(observation), float(reward or 0.0), terminated=done), record

    def _unavailable(self, what: str, error: BaseException | None = None) -> ToolUnavailableError:
        self.close()
        why = "" if error is None else f" ({type(error).__name__}: {error})"
        return ToolUnavailableError(f"OpenEnv server {self._server.url}: {what}{why}"[:_MAX_ERROR_CHARS])

    def close(self) -> None:
        """Hang up; the server then frees the episode's place."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.transport.abort()
