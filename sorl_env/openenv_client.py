"""A client of OpenEnv's protocol: JSON messages over a WebSocket, one connection for each episode.

It needs the package ``websockets`` only. OpenEnv's own client belongs to a package that brings 70 others, a web
interface among them, and reads replies of up to 100 MB; the protocol is four kinds of messages.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sorl_env.openenv_wire import KEY, reply_from_json
from sorl_env.session_env import Reply
from sorl_env.task import Example
from sorl_env.text import quoted, read_json
from sorl_env.tool import ToolInputError, ToolUnavailableError
from sorl_env.trajectory import StopReason

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0  # between two attempts to connect
_CONNECT_S = 10.0
_MAX_ERROR_CHARS = 1000

ToAction = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Server:
    """An OpenEnv server, and how its actions and observations become text.

    Attributes:
        url: as ``http://127.0.0.1:8303``.
        is_sorl: it is ``sorl-serve-env``, and its metadata says all that our own environment would.
        to_action: makes an action of a text; raises ``ToolInputError`` for a text that is none.
        to_text: the text of an observation.
        timeout_s: for one message and its reply.
        wait_s: for a place on a server that is full, or for one that is being restarted, at the beginning of an
            episode.
        max_reply_bytes: longer replies are refused.
    """

    url: str
    is_sorl: bool
    to_action: ToAction
    to_text: Callable[[Mapping[str, Any]], str]
    timeout_s: float = 60.0
    wait_s: float = 300.0
    max_reply_bytes: int = 4 << 20
    token: str | None = field(default=None, repr=False)

    @property
    def socket_url(self) -> str:
        """The address of the WebSocket."""
        scheme, _, rest = self.url.partition("://")
        return f"{'wss' if scheme == 'https' else 'ws'}://{rest.rstrip('/')}/ws"


class _FullError(Exception):
    """The server has no place for another episode."""


class _Observation(NamedTuple):
    text: str
    reward: float
    done: bool
    metadata: Mapping[str, Any]


class OpenEnvSession:
    """One episode on a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: ClientConnection | None = None

    async def reset(self, example: Example, seed: int) -> tuple[str, Example]:
        """Connect and start an episode; waits where the server is full or does not answer yet."""
        from websockets.exceptions import InvalidStatus, WebSocketException

        place = example.metadata
        data = {name: place[name] for name in ("split", "index") if name in place}
        data["seed"] = seed if self._server.is_sorl else place.get("seed", place.get("index", 0))
        deadline, wait = time.monotonic() + self._server.wait_s, _FIRST_WAIT_S
        while True:
            try:
                await self._connect()
                found = await self._ask("reset", data)
                break
            except (OSError, WebSocketException, asyncio.TimeoutError, _FullError) as error:
                self.close(ended=False)
                if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403):
                    raise self._unavailable("it refuses the token", error) from error
                if time.monotonic() + wait > deadline:
                    raise self._unavailable(
                        f"no episode began within {self._server.wait_s:g} s", error
                    ) from error
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)
        known = found.metadata.get("example")
        if self._server.is_sorl and isinstance(known, dict):
            example = Example(
                id=str(known.get("id", example.id)),
                question=str(known.get("question", "")),
                golden_answers=example.golden_answers,
                metadata=example.metadata,
            )
        return found.text, example

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect

        server = self._server
        headers = {} if server.token is None else {"Authorization": f"Bearer {server.token}"}
        self._connection = await connect(
            server.socket_url,
            additional_headers=headers,
            compression=None,  # so that no small message becomes a large one
            max_size=server.max_reply_bytes,
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
        from websockets.exceptions import WebSocketException

        try:
            found = await self._ask("step", action)
        except (OSError, WebSocketException, asyncio.TimeoutError, _FullError) as error:
            raise self._unavailable("the episode was lost", error) from error
        if self._server.is_sorl:
            try:
                return reply_from_json(found.text, found.reward, found.metadata)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise self._unavailable("its metadata cannot be read", error) from error
        truncated = found.done and found.metadata.get("truncated") is True
        return Reply(found.text, found.reward, found.done and not truncated, truncated)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> _Observation:
        """Send a message; returns the observation that answers it."""
        assert self._connection is not None
        connection = self._connection
        message = json.dumps({"type": kind, "data": dict(data)})

        async def exchange() -> str | bytes:
            await connection.send(message)
            return await connection.recv()

        text = await asyncio.wait_for(exchange(), self._server.timeout_s)
        try:
            reply = read_json(text)
        except ValueError as error:
            raise self._unavailable("its reply cannot be read", error) from error
        if not isinstance(reply, dict) or not isinstance(found := reply.get("data"), dict):
            raise self._unavailable(f"its reply is not a message of OpenEnv: {quoted(str(reply))}")
        if reply.get("type") == "error":
            raise self._refusal(found)
        if reply.get("type") != "observation":
            raise self._unavailable(f"its reply is of type {quoted(str(reply.get('type')))}, not observation")
        return self._read(found)

    def _refusal(self, data: Mapping[str, Any]) -> Exception:
        code, said = data.get("code"), quoted(str(data.get("message")), _MAX_ERROR_CHARS)
        if code == "CAPACITY_REACHED":
            return _FullError(said)
        if code == "VALIDATION_ERROR":  # the policy wrote an action of another form
            wrong = str(data.get("errors") or said)[:300]
            return ToolInputError(f"This action is not possible here: {wrong}")
        return self._unavailable(f"it says {quoted(str(code))}: {said}")

    def _read(self, data: Mapping[str, Any]) -> _Observation:
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise self._unavailable("its observation has another form")
        if reward is not None and (not isinstance(reward, (int, float)) or not math.isfinite(reward)):
            raise self._unavailable(f"it gave a reward of {quoted(str(reward))}")
        record = observation.get("metadata")
        if self._server.is_sorl:
            record = record.get(KEY) if isinstance(record, dict) else None
            if not isinstance(record, dict):
                raise self._unavailable(f"its metadata lacks {KEY!r}")
        text = self._server.to_text(observation)
        return _Observation(text, float(reward or 0.0), done, record if isinstance(record, dict) else {})

    def _unavailable(self, what: str, error: BaseException | None = None) -> ToolUnavailableError:
        self.close(ended=False)
        why = "" if error is None else f" ({type(error).__name__}: {error})"
        return ToolUnavailableError(f"OpenEnv server {self._server.url}: {what}{why}"[:_MAX_ERROR_CHARS])

    def close(self, *, ended: bool) -> None:
        """Hang up; the server then frees the episode's place."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.transport.abort()
