"""The search tool over HTTP: a client of retrieval servers that speak Search-R1's protocol."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_env.tool import ToolReply, ToolUnavailableError
from sorl_tools.corpus import format_passages
from sorl_tools.search.http_cache import Key, ReplyCache
from sorl_tools.search.http_protocol import TOKEN_VARIABLE, Body, addresses, check_query, read_passages

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
    """A client of retrieval servers: ``POST {"queries": [query], "topk": k, "return_scores": true}`` to ``/retrieve``.

    Calls take the servers in turn, and a call asks the next one if a server fails. Whether the whole call is repeated
    is decided by the toolbox. Connections are pooled: one pool for threads, and one for each event loop.

    Args:
        url: address of a server, or of several that hold the same index: a list, or addresses separated by commas.
            ``/retrieve`` is added to an address without a path.
        timeout_s: for one call; a request to one of several servers gets an equal share of it.
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
        self._turns = itertools.count()
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self._request_s = request_s = timeout_s / len(self.urls)
        self._options: dict[str, Any] = {
            "timeout": httpx.Timeout(request_s, connect=min(5.0, request_s)),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
            # a small compressed body can unpack to any size
            "headers": {"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {token}"} if token else {}),
        }
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
        while not self._knows_fingerprint():
            if time.monotonic() > ends_at:
                raise UserError(
                    f"search_url={self.url}: no server answers; start one: sorl-serve INDEX_OR_CORPUS"
                )
            logger.warning("waiting up to %g s for the search server at %s", self._timeout_s, self.url)
            time.sleep(min(1.0, self._timeout_s))
        return self._fingerprint or self.url

    def __call__(self, query: str) -> ToolReply:
        """Search once."""
        query = check_query(query)
        if self.cache is not None:
            self._knows_fingerprint()
        kept = self._look_up(query)
        if kept is not None:
            return kept
        outage: Exception | None = None
        for url in self._in_turn():
            try:
                body = Body(url, self._request_s)
                with self._client.stream("POST", url, json=self._request(query)) as response:
                    for chunk in response.iter_raw():
                        body.add(chunk)
                return self._read(query, response, body)
            except Exception as error:  # noqa: BLE001  _as_outage raises whatever is not one
                outage = _as_outage(url, error)
        raise outage or AssertionError("there is at least one address")

    async def acall(self, query: str) -> ToolReply:
        """Search once, on the event loop."""
        query = check_query(query)
        if self.cache is not None and self._fingerprint is None:
            await asyncio.get_running_loop().run_in_executor(None, self._knows_fingerprint)
        kept = self._look_up(query)
        if kept is not None:
            return kept
        outage: Exception | None = None
        for url in self._in_turn():
            try:
                body, client = Body(url, self._request_s), self._async_client()
                async with client.stream("POST", url, json=self._request(query)) as response:
                    async for chunk in response.aiter_raw():
                        body.add(chunk)
                return self._read(query, response, body)
            except Exception as error:  # noqa: BLE001  _as_outage raises whatever is not one
                outage = _as_outage(url, error)
        raise outage or AssertionError("there is at least one address")

    def close(self) -> None:
        """Close the pooled connections and the cache."""
        self._client.close()
        self._clients.clear()  # their event loops have ended, and their connections with them
        if self.cache is not None:
            self.cache.close()

    def _in_turn(self) -> Iterator[str]:
        """Every address once; the next call begins with the next one."""
        first = next(self._turns) % len(self.urls)
        return iter(self.urls[first:] + self.urls[:first])

    def _request(self, query: str) -> dict[str, Any]:
        return {"queries": [query], "topk": self.top_k, "return_scores": True}

    def _key(self, query: str) -> Key:
        return self._fingerprint or self.url, self.top_k, query

    def _look_up(self, query: str) -> ToolReply | None:
        passages = None if self.cache is None else self.cache.get(self._key(query))
        return None if passages is None else format_passages(passages)._replace(cached=True)

    def _read(self, query: str, response: httpx.Response, body: Body) -> ToolReply:
        """The reply in a server's response, which is kept under the index that gave it."""
        passages = read_passages(response, body.content)
        told = response.headers.get(FINGERPRINT_HEADER)
        if told and told != self._fingerprint:
            if self._fingerprint:
                logger.warning("%s searches another index now: %s", response.request.url, told)
            self._fingerprint = told
        if self.cache is not None:
            self.cache.put((told or self.url, self.top_k, query), passages)
        return format_passages(passages)

    def _async_client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            import httpx

            for ended in [other for other in self._clients if other.is_closed()]:
                del self._clients[ended]
            client = self._clients[loop] = httpx.AsyncClient(**self._options)
        return client

    def _knows_fingerprint(self) -> bool:
        """Ask the servers for the hash of their index, until one has answered; returns whether one ever has.

        The hash is ``""`` where a server of another kind tells none, and None while nobody has answered.
        """
        import httpx

        for url in () if self._fingerprint is not None else map(httpx.URL, self.urls):
            health = url.copy_with(path=url.path.rpartition("/")[0] + "/health")
            try:
                body = Body(health, self._request_s)
                with self._client.stream("GET", health) as response:
                    for chunk in response.iter_raw():
                        body.add(chunk)
                said = read_json(bytes(body.content))
                if said.get("ready") is False:
                    continue  # it does not know while it opens its index
                told = said.get("fingerprint")
                self._fingerprint = told if isinstance(told, str) else ""
            except (httpx.RemoteProtocolError, ToolUnavailableError, ValueError, AttributeError):
                self._fingerprint = ""
            except httpx.RequestError:
                continue
            break
        return self._fingerprint is not None


def _as_outage(url: str, error: Exception) -> ToolUnavailableError:
    """The error as an outage of its server; one that is a bug, or the policy's fault, is raised again."""
    import httpx

    if isinstance(error, ToolUnavailableError):
        return error
    if not isinstance(error, httpx.RequestError):
        raise error
    outage = ToolUnavailableError(f"{url}: {type(error).__name__}: {error}")
    outage.__cause__ = error
    return outage
