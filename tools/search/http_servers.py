"""The servers of a search client: which one to ask, and which one to leave alone for a while."""

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

MAX_FAILURES = 3  # in a row; after that a server is not asked for a while
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 300.0
_POLL_S = 0.05

_jitter = random.Random()  # its own generator, so that pauses do not change the draws of others


@dataclass
class Server:
    """The state of one server, kept by its ``ServerPool``.

    Attributes:
        failures: number of failures in a row.
        resting_until: the server is not asked before this time (``time.monotonic``).
        probing: one request is testing whether the server works again; others wait for its result.
    """

    url: str
    failures: int = 0
    in_flight: int = 0
    resting_since: float = 0.0
    resting_until: float = 0.0
    down_since: float | None = None
    probing: bool = False


class Attempt(NamedTuple):
    """Permission to send one request to a server; call ``finish`` or ``abandon`` on every outcome."""

    server: Server
    started: float
    is_probe: bool


class ServerPool:
    """Circuit breakers for the servers, shared by all threads and event loops of a client.

    After three failures in a row, or if it answers with Retry-After, a server rests. Then a single request tests it. If
    that fails, the server rests again, for longer: from 0.5 s doubling up to 8 s, with jitter.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.servers = [Server(url) for url in urls]
        self._lock = threading.Lock()

    def begin(self, tried: Collection[str] = ()) -> Attempt | float | None:
        """An attempt at the least busy server, the seconds to wait if all rest, or None if all were tried."""
        now = time.monotonic()
        with self._lock:
            left = [server for server in self.servers if server.url not in tried]
            if not left:
                return None
            awake = [s for s in left if s.resting_until <= now and not s.probing]
            if not awake:
                return max(_POLL_S, min(s.resting_until for s in left) - now)
            # servers that have failed are asked last
            server = min(awake, key=lambda s: (s.failures > 0, s.in_flight))
            is_probe = server.resting_until > 0
            server.probing = is_probe
            server.in_flight += 1
            return Attempt(server, now, is_probe)

    def finish(self, attempt: Attempt, failure: str | None = None, rest_s: float | None = None) -> None:
        """Report the outcome of an attempt.

        Args:
            failure: what went wrong; None if the server answered.
            rest_s: how long the server asked to be left alone.
        """
        server, now = attempt.server, time.monotonic()
        with self._lock:
            server.in_flight -= 1
            if attempt.is_probe:
                server.probing = False
            if failure is None:
                self._recover(server, attempt, now)
            elif attempt.started >= server.resting_since:  # older requests say nothing new
                server.failures += 1
                if rest_s is not None:
                    self._rest(server, now, min(rest_s, MAX_RETRY_AFTER_S), failure)
                elif server.failures >= MAX_FAILURES:
                    pause = min(FIRST_PAUSE_S * 2 ** (server.failures - MAX_FAILURES), MAX_PAUSE_S)
                    self._rest(server, now, pause, failure)

    def abandon(self, attempt: Attempt) -> None:
        """Report that the request was cancelled, so that nothing is known about the server."""
        with self._lock:
            attempt.server.in_flight -= 1
            if attempt.is_probe:
                attempt.server.probing = False

    def _rest(self, server: Server, now: float, pause_s: float, failure: str) -> None:
        server.resting_since = now
        server.resting_until = now + pause_s * _jitter.uniform(1.0, 1.2)  # at least what it asked for
        if server.down_since is None:
            server.down_since = now
            logger.warning("a search server is out; it is asked again after %.1f s: %s", pause_s, failure)

    def _recover(self, server: Server, attempt: Attempt, now: float) -> None:
        if server.resting_until > now and not attempt.is_probe and attempt.started < server.resting_since:
            return  # the answer to a request from before the server asked for a rest
        if server.down_since is not None:
            logger.warning("a search server is back after %.1f s: %s", now - server.down_since, server.url)
        server.failures, server.resting_until, server.down_since = 0, 0.0, None


class Call:
    """One call, which asks server after server until one answers, all have failed, or the time is up."""

    def __init__(self, pool: ServerPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._ends_at = time.monotonic() + timeout_s
        self._tried: set[str] = set()
        self._error: ToolUnavailableError | None = None

    def next(self) -> Attempt | float:
        """The next attempt, or how many seconds to wait before calling this again.

        Raises:
            ToolUnavailableError: no server is left, or none can be asked again in time.
        """
        attempt = self._pool.begin(self._tried)
        if attempt is None or (isinstance(attempt, float) and time.monotonic() + attempt > self._ends_at):
            reason = f"no search server answers, and none can be asked again within {self._timeout_s:g} s"
            raise self._error or ToolUnavailableError(reason)
        return attempt

    def failed(self, attempt: Attempt, error: Exception, retry_after_s: float | None = None) -> None:
        """Report an outage. An error that is not one is raised again."""
        import httpx

        if isinstance(error, httpx.RequestError):  # of the transport, or of decoding
            cause = error
            error = ToolUnavailableError(f"{attempt.server.url}: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        if not isinstance(error, ToolUnavailableError):
            self._pool.finish(attempt)
            raise error
        self._pool.finish(attempt, str(error), retry_after_s)
        self._error = error
        if not attempt.is_probe:  # after a failed probe the call goes on waiting for that server
            self._tried.add(attempt.server.url)
