"""The servers behind a search client: which one to ask, and which one to leave alone for a while."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sorl_env.tool import ToolUnavailableError

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # in a row; then a server is left alone
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 300.0
_POLL_S = 0.05

_jitter = random.Random()  # its own generator: a pause must not disturb anyone's seeds


@dataclass
class Server:
    """One server's state, kept by its ``ServerPool``.

    Attributes:
        failures: in a row.
        resting_until: it is not asked before (``time.monotonic``).
        probing: one request finds out whether it is back; the others wait for what comes of it.
    """

    url: str
    failures: int = 0
    in_flight: int = 0
    resting_since: float = 0.0
    resting_until: float = 0.0
    down_since: float | None = None
    probing: bool = False


class Turn(NamedTuple):
    """Leave to ask a server; ``finish`` it whatever happens."""

    server: Server
    started: float
    is_probe: bool


class ServerPool:
    """Circuit breakers of the servers, shared by all threads and event loops of a client.

    After three failures in a row, or when it answers Retry-After, a server rests. Then a single request tries it: if
    that fails, the server rests again, for longer (0.5 s doubling up to 8 s, with jitter).
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.servers = [Server(url) for url in urls]
        self._lock = threading.Lock()

    def begin(self, tried: Collection[str] = ()) -> Turn | float | None:
        """A turn at the least busy server; seconds to wait when all rest; None when all of them were tried."""
        now = time.monotonic()
        with self._lock:
            left = [server for server in self.servers if server.url not in tried]
            if not left:
                return None
            awake = [s for s in left if s.resting_until <= now and not s.probing]
            if not awake:
                return max(_POLL_S, min(s.resting_until for s in left) - now)
            # one that has failed is asked only where it must be
            server = min(awake, key=lambda s: (s.failures > 0, s.in_flight))
            is_probe = server.resting_until > 0
            server.probing = is_probe
            server.in_flight += 1
            return Turn(server, now, is_probe)

    def finish(self, turn: Turn, failure: str | None = None, retry_after_s: float | None = None) -> None:
        """What came of a turn.

        Args:
            failure: what went wrong; None when the server answered.
            retry_after_s: how long it asked to be left alone.
        """
        server, now = turn.server, time.monotonic()
        with self._lock:
            server.in_flight -= 1
            if turn.is_probe:
                server.probing = False
            if failure is None:
                self._recover(server, turn, now)
            elif (
                turn.started >= server.resting_since
            ):  # older requests say nothing new about a resting server
                server.failures += 1
                if retry_after_s is not None:
                    self._rest(server, now, min(retry_after_s, MAX_RETRY_AFTER_S), failure)
                elif server.failures >= MAX_FAILURES:
                    pause = min(FIRST_PAUSE_S * 2 ** (server.failures - MAX_FAILURES), MAX_PAUSE_S)
                    self._rest(server, now, pause, failure)

    def abandon(self, turn: Turn) -> None:
        """The request was cancelled: nothing is known."""
        with self._lock:
            turn.server.in_flight -= 1
            if turn.is_probe:
                turn.server.probing = False

    def _rest(self, server: Server, now: float, pause_s: float, failure: str) -> None:
        server.resting_since = now
        server.resting_until = now + pause_s * _jitter.uniform(1.0, 1.2)  # never sooner than it asked for
        if server.down_since is None:
            server.down_since = now
            logger.warning("search server out, asked again in %.1f s and later: %s", pause_s, failure)

    def _recover(self, server: Server, turn: Turn, now: float) -> None:
        if server.resting_until > now and not turn.is_probe and turn.started < server.resting_since:
            return  # an answer to an older request: the rest it asked for since counts
        if server.down_since is not None:
            logger.warning("search server back after %.1f s: %s", now - server.down_since, server.url)
        server.failures, server.resting_until, server.down_since = 0, 0.0, None


class Call:
    """One call's way from server to server, until one answers, all have failed, or time is up."""

    def __init__(self, pool: ServerPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._ends_at = time.monotonic() + timeout_s
        self._tried: set[str] = set()
        self._error: ToolUnavailableError | None = None

    def next(self) -> Turn | float:
        """A turn at a server, or seconds to wait.

        Raises:
            ToolUnavailableError: no server is left, or none comes back in time.
        """
        turn = self._pool.begin(self._tried)
        if turn is None or (isinstance(turn, float) and time.monotonic() + turn > self._ends_at):
            waited = f"no search server answers, and none is asked again within {self._timeout_s:g} s"
            raise self._error or ToolUnavailableError(waited)
        return turn

    def failed(self, turn: Turn, error: Exception, retry_after_s: float | None = None) -> None:
        """Note an outage; anything else is raised."""
        import httpx

        if isinstance(error, httpx.RequestError):  # of the transport, or of decoding
            cause = error
            error = ToolUnavailableError(f"{turn.server.url}: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        if not isinstance(error, ToolUnavailableError):
            self._pool.finish(turn)
            raise error
        self._pool.finish(turn, str(error), retry_after_s)
        self._error = error
        if not turn.is_probe:  # a call that waits for a server to come back goes on waiting
            self._tried.add(turn.server.url)
