"""The search tool over HTTP: a client of retrieval servers that speak Search-R1's protocol."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_env.tool import ToolReply, ToolUnavailableError
from sorl_tools.corpus import Passage, format_passages
from sorl_tools.search.http_cache import Key, ReplyCache
from sorl_tools.search.http_protocol import (
    MAX_HEALTH_BYTES,
    TOKEN_VARIABLE,
    Answer,
    Body,
    addresses,
    check_query,
    check_status,
    checked,
    max_reply_bytes,
    parse,
    retry_after_s,
    split_queries,
)
from sorl_tools.search.http_servers import Attempt, Call, ServerPool

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

DESCRIPTION = "Search an encyclopedia-like corpus; returns the passages that fit the query best."
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "keywords or a question"}},
    "required": ["query"],
}
FINGERPRINT_HEADER = "x-sorl-fingerprint"


class HttpSearch:
    """A client of retrieval servers: ``POST {"queries": [..], "topk": k, "return_scores": true}`` to ``/retrieve``.

    A call asks one server, and the next one if that fails. Whether the whole call is repeated is decided by the
    toolbox. A server that has failed repeatedly or has sent Retry-After is not asked for a while; calls wait for it up
    to ``timeout_s``, so that a run survives the restart of its server. Connections are pooled: one pool for threads,
    and one for each event loop.

    Args:
        url: address of a server, or of several that hold the same index: a list, or addresses separated by commas.
            ``/retrieve`` is added to an address without a path.
        timeout_s: for one call, with all servers and the wait for them. A single request gets an equal share of it.
        cache: keeps replies by the fingerprint of the index. Servers that do not send one (others than ``sorl-serve``)
            must not change their index while a cache file is in use. A reply from the cache says ``cached``.
        token: sent as ``Authorization: Bearer``; None takes the environment variable ``SORL_SEARCH_TOKEN``.

    Raises:
        UserError: ``url`` is not an http or https address.
        ToolInputError: when called: the query is longer than servers accept.
        ToolUnavailableError: when called: no connection, a time-out, 5xx, 408, 429, or a reply that breaks the
            protocol.
        ValueError: when called: another 4xx, so the request, the token or the address is wrong.
    """

    name = "search"
    description = DESCRIPTION
    schema = SCHEMA
    inline = False

    def __init__(
        self,
        url: str | Sequence[str],
        top_k: int = 3,
        timeout_s: float = 30.0,
        *,
        cache: ReplyCache | None = None,
        token: str | None = None,
    ) -> None:
        import httpx  # imported here, because tasks that search in this process do not need it

        self.urls = addresses(url)
        self.url = ",".join(self.urls)
        self.top_k = top_k
        self.cache = cache
        self._timeout_s = timeout_s
        self._fingerprint: str | None = None
        self._has_asked = False
        self._pool = ServerPool(self.urls)
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        request_s = timeout_s / len(self.urls)
        self._options: dict[str, Any] = {
            "timeout": httpx.Timeout(request_s, connect=min(5.0, request_s)),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
            "headers": {"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {token}"} if token else {}),
        }
        self._request_s = request_s
        self._client = httpx.Client(**self._options)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    @property
    def fingerprint(self) -> str:
        """Identifies what is searched, in a run's manifest: the hash of the index, or the addresses if none is sent.

        Waits up to ``timeout_s`` for a server that is starting.

        Raises:
            UserError: no server answers.
        """
        ends_at = time.monotonic() + self._timeout_s
        said = False
        while not self._ask_fingerprint():
            if time.monotonic() > ends_at:
                raise UserError(
                    f"search_url={self.url}: no server answers; start one: sorl-serve INDEX_OR_CORPUS"
                )
            if not said:
                logger.warning("waiting up to %g s for the search server at %s", self._timeout_s, self.url)
                said = True
            time.sleep(min(1.0, self._timeout_s))
        return self._fingerprint or self.url

    def __call__(self, query: str) -> ToolReply:
        """Search once."""
        (reply,) = self.call_batch([query])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def call_batch(self, arguments: Sequence[str]) -> list[Any]:
        """Search for several queries: in one request or, beyond 256 queries or half a megabyte, in several at a time.

        The result of a query that is too long, and of each query of a request that failed, is an exception.
        """
        queries = [checked(query) for query in arguments]
        if self.cache is not None:
            self._ask_fingerprint()
        replies, missing = self._look_up([query for query in queries if isinstance(query, str)])
        parts = split_queries(missing)
        if len(parts) == 1:
            replies.update(self._keep(parts[0], self._retrieve(parts[0])))
        elif parts:
            with ThreadPoolExecutor(min(len(parts), 8)) as threads:
                for part, future in [(part, threads.submit(self._retrieve, part)) for part in parts]:
                    error = future.exception()
                    replies.update(dict.fromkeys(part, error) if error else self._keep(part, future.result()))
        return [replies[query] if isinstance(query, str) else query for query in queries]

    async def acall(self, query: str) -> ToolReply:
        """Search once, on the event loop."""
        query = check_query(query)
        if self.cache is not None and not self._has_asked:
            await asyncio.get_running_loop().run_in_executor(None, self._ask_fingerprint)
        replies, missing = self._look_up([query])
        if missing:
            replies.update(self._keep(missing, await self._aretrieve(missing)))
        return replies[query]

    def close(self) -> None:
        """Close the pooled connections and the cache."""
        self._client.close()
        self._clients.clear()  # their event loops have ended, and their connections with them
        if self.cache is not None:
            self.cache.close()

    def _look_up(self, queries: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Replies from the cache by query, and the queries that are not in it, each once."""
        replies: dict[str, Any] = {}
        if self.cache is None:
            return replies, list(dict.fromkeys(queries))
        for query in queries:
            passages = self.cache.get(self._key(query))
            if passages is not None:
                replies[query] = format_passages(passages)._replace(metadata={"cached": True})
        return replies, [query for query in dict.fromkeys(queries) if query not in replies]

    def _keep(self, queries: Sequence[str], found: _Found) -> dict[str, ToolReply]:
        if self.cache is not None:
            self.cache.put(
                (self._key(query, found.fingerprint), passages)
                for query, passages in zip(queries, found.passages, strict=True)
            )
        return dict(zip(queries, map(format_passages, found.passages), strict=True))

    def _key(self, query: str, fingerprint: str | None = None) -> Key:
        return fingerprint or self._fingerprint or self.url, self.top_k, query

    def _retrieve(self, queries: Sequence[str]) -> _Found:
        """The passages for each query, from the first server that returns them."""
        call = Call(self._pool, self._timeout_s)
        while True:
            attempt = call.next()
            if isinstance(attempt, float):
                time.sleep(attempt)
                continue
            try:
                answer = self._ask(attempt.server.url, self._payload(queries))
            except Exception as error:  # noqa: BLE001  Call raises whatever is not an outage
                call.failed(attempt, error)
                continue
            except BaseException:  # Ctrl-C
                self._pool.abandon(attempt)
                raise
            found = self._read(call, attempt, answer, len(queries))
            if found is not None:
                return found

    async def _aretrieve(self, queries: Sequence[str]) -> _Found:
        call = Call(self._pool, self._timeout_s)
        while True:
            attempt = call.next()
            if isinstance(attempt, float):
                await asyncio.sleep(attempt)
                continue
            try:
                answer = await self._aask(attempt.server.url, self._payload(queries))
            except Exception as error:  # noqa: BLE001  Call raises whatever is not an outage
                call.failed(attempt, error)
                continue
            except BaseException:  # cancelled, or Ctrl-C
                self._pool.abandon(attempt)
                raise
            found = self._read(call, attempt, answer, len(queries))
            if found is not None:
                return found

    def _payload(self, queries: Sequence[str]) -> dict[str, Any]:
        return {"queries": list(queries), "topk": self.top_k, "return_scores": True}

    def _ask(self, url: str, payload: Mapping[str, Any]) -> Answer:
        ends_at = time.monotonic() + self._request_s
        with self._client.stream("POST", url, json=payload) as response:
            body = Body(url, response.headers, self._most_bytes(payload), ends_at)
            for chunk in response.iter_raw():
                body.add(chunk)
        return Answer(url, response.status_code, response.headers, bytes(body))

    async def _aask(self, url: str, payload: Mapping[str, Any]) -> Answer:
        ends_at = time.monotonic() + self._request_s
        async with self._async_client().stream("POST", url, json=payload) as response:
            body = Body(url, response.headers, self._most_bytes(payload), ends_at)
            async for chunk in response.aiter_raw():
                body.add(chunk)
        return Answer(url, response.status_code, response.headers, bytes(body))

    def _most_bytes(self, payload: Mapping[str, Any]) -> int:
        return max_reply_bytes(len(payload["queries"]), self.top_k)

    def _async_client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            import httpx

            for ended in [other for other in self._clients if other.is_closed()]:
                del self._clients[ended]
            client = self._clients[loop] = httpx.AsyncClient(**self._options)
        return client

    def _read(self, call: Call, attempt: Attempt, answer: Answer, count: int) -> _Found | None:
        """The content of an answer; None if it is an outage, so that ``call`` asks the next server."""
        try:
            check_status(answer)
            found = parse(answer, count)
        except ToolUnavailableError as error:
            call.failed(attempt, error, retry_after_s(answer))
            return None
        except BaseException:
            self._pool.finish(attempt)  # the server works, but the request is wrong
            raise
        self._pool.finish(attempt)
        told = answer.headers.get(FINGERPRINT_HEADER)
        if told not in (None, self._fingerprint):
            if self._fingerprint is not None:
                logger.warning("%s searches another index now: %s", attempt.server.url, told)
            self._fingerprint, self._has_asked = told, True
        return _Found(found, told)

    def _ask_fingerprint(self) -> bool:
        """Ask the servers for the hash of their index, until one has answered; returns whether one has."""
        import httpx

        for url in () if self._has_asked else map(httpx.URL, self.urls):
            health = url.copy_with(path=url.path.rpartition("/")[0] + "/health")
            try:
                said = self._ask_health(health)
                self._has_asked = said.get("ready") is not False  # it does not know while it opens its index
                told = said.get("fingerprint")
                self._fingerprint = told if told and isinstance(told, str) else self._fingerprint
            except (httpx.RemoteProtocolError, ToolUnavailableError, ValueError, AttributeError):
                self._has_asked = True  # a server of another kind, which sends no hash
            except httpx.RequestError:
                continue
            if self._has_asked:
                break
        return self._has_asked

    def _ask_health(self, url: httpx.URL) -> Any:
        timeout_s = min(5.0, self._request_s)
        with self._client.stream("GET", url, timeout=timeout_s) as response:
            body = Body(str(url), response.headers, MAX_HEALTH_BYTES, time.monotonic() + timeout_s)
            for chunk in response.iter_raw():
                body.add(chunk)
        return read_json(bytes(body))


class _Found(NamedTuple):
    """What a server found: the passages for each query, and the hash of their index if the server sent one."""

    passages: list[list[Passage]]
    fingerprint: str | None
