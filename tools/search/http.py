"""The search tool over HTTP: a client of servers that speak Search-R1's protocol, none of which are trusted.

A cache keeps replies in SQLite: in a file that later runs and other processes share, or in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from sorl_env.errors import UserError, http_address
from sorl_env.text import read_json, valid_text
from sorl_env.tool import ToolInputError, ToolReply, ToolUnavailableError
from sorl_tools.corpus import Passage, format_passages

logger = logging.getLogger(__name__)

Key = tuple[str, int, str]  # fingerprint of the index, top_k, query

KEPT_IN_MEMORY = 4096
KEPT_IN_FILE = 350_000  # searches of three passages of 100 words: about a gigabyte


class ReplyCache:
    """Passages by index, ``top_k`` and query. Threads, and processes of one machine, may share it. ``path`` is a SQLite
    file on a local disk (its journal does not work over a network); None keeps replies in memory. Beyond
    ``max_replies`` the oldest are deleted; None keeps 4,096 in memory, 350,000 in a file. A file that cannot be used is
    a UserError, and for ``get`` and ``put`` an OSError: the disk is full or gone."""

    def __init__(self, path: str | Path | None = None, max_replies: int | None = None) -> None:
        self._max_replies = max_replies or (KEPT_IN_MEMORY if path is None else KEPT_IN_FILE)
        self._path = ":memory:" if path is None else Path(path).expanduser()
        self._lock = threading.Lock()
        try:
            if isinstance(self._path, Path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._path, timeout=30.0, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = WAL")  # readers and one writer at a time
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS replies (fingerprint TEXT, top_k INTEGER, query TEXT, passages TEXT, "
                "PRIMARY KEY (fingerprint, top_k, query))"
            )
            self.get(("", 0, ""))  # the table may be another program's
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"{path}: replies cannot be kept there ({error}); give another file") from error

    def get(self, key: Key) -> list[Passage] | None:
        """The passages, or None; what is damaged counts as not there."""
        query = "SELECT passages FROM replies WHERE fingerprint = ? AND top_k = ? AND query = ?"
        with self._open() as file:
            row = file.execute(query, key).fetchone()
        try:
            return None if row is None else [Passage(*fields) for fields in json.loads(row[0])]
        except (ValueError, TypeError):
            return None

    def put(self, key: Key, passages: Sequence[Passage]) -> None:
        """Keep a reply."""
        text = json.dumps([[p.id, p.title, p.text] for p in passages], ensure_ascii=False)
        with self._open() as file:
            file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", (*key, text))
            # row ids count up, so these are the oldest
            file.execute("DELETE FROM replies WHERE rowid <= last_insert_rowid() - ?", (self._max_replies,))

    def close(self) -> None:
        """Close the file, after what another thread reads or writes: SQLite crashes if it is closed in between."""
        with self._lock:
            self._file.close()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock, self._file as file:
                yield file
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error


DESCRIPTION = "Search an encyclopedia-like corpus; returns the passages that fit the query best."
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "keywords or a question"}},
    "required": ["query"],
}
FINGERPRINT_HEADER = "x-sorl-fingerprint"
TOKEN_VARIABLE = "SORL_SEARCH_TOKEN"
MAX_QUERY_CHARS = 4096  # servers refuse a longer query with the status of a wrong address
MAX_REPLY_BYTES = 16 << 20  # servers send some kilobytes


class HttpSearch:
    """A client of retrieval servers: ``POST {"queries": [query], "topk": k, "return_scores": true}`` to ``/retrieve``.
    Calls take the servers in turn, and a call asks the next one if a server fails. Whether the whole call is repeated
    is decided by the toolbox. Connections are pooled: one pool for threads, and one for each event loop. ``url`` is the
    address of a server, or of several that hold the same index: a list, or addresses separated by commas; ``/retrieve``
    is added to an address without a path. ``timeout_s`` is for one call; a request to one of several servers gets an
    equal share of it. ``cache`` keeps replies by the fingerprint of the index, and a reply from it says ``cached``;
    servers that do not send one (others than ``sorl-serve``) must not change their index while a cache file is in use.
    ``token`` is sent as ``Authorization: Bearer``; None takes the environment variable ``SORL_SEARCH_TOKEN``. Raises
    ``UserError`` if ``url`` is not an http or https address. A call raises ``ToolInputError`` if the query is longer
    than servers accept; ``ToolUnavailableError`` without a connection, after a time-out, for 5xx, 408, 429, or a reply
    that breaks the protocol; and ``ValueError`` for another 4xx, so the request, the token or the address is wrong."""

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
        self.urls = _addresses(url)
        self.url = ",".join(map(_shown, self.urls))
        self.top_k = top_k
        self.cache = cache
        self._timeout_s = timeout_s
        self._fingerprint: str | None = None  # "" where a server of another kind tells none
        self._turns = itertools.count()
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self._request_s = timeout_s / len(self.urls)
        self._options: dict[str, Any] = {
            "timeout": httpx.Timeout(self._request_s, connect=min(5.0, self._request_s)),
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
        Waits up to ``timeout_s`` for a server that is starting; raises UserError if none answers."""
        ends_at = time.monotonic() + self._timeout_s
        waiting = False
        while self._fingerprint is None and not self._ask_fingerprint():
            if time.monotonic() > ends_at:
                raise UserError(
                    f"search.url={self.url}: no server answers; start one: sorl-serve INDEX_OR_CORPUS"
                )
            if not waiting:
                logger.warning("waiting up to %g s for the search server at %s", self._timeout_s, self.url)
            waiting = True
            time.sleep(min(1.0, self._timeout_s))
        return self._fingerprint or self.url

    def __call__(self, query: str) -> ToolReply:
        """Search once."""
        query = check_query(query)
        if self.cache is not None and self._fingerprint is None:
            self._ask_fingerprint()
        if (kept := self._look_up(query)) is not None:
            return kept
        outages: list[ToolUnavailableError] = []
        for url in self._in_turn():
            body = _Body(url, self._request_s)
            with (
                _noting(url, outages),
                self._client.stream("POST", url, json=self._request(query)) as response,
            ):
                for chunk in response.iter_raw():
                    body.add(chunk)
                return self._read(query, response, body)
        raise outages[-1]

    async def acall(self, query: str) -> ToolReply:
        """Search once, on the event loop."""
        query = check_query(query)
        if self.cache is not None and self._fingerprint is None:
            await asyncio.get_running_loop().run_in_executor(None, self._ask_fingerprint)
        if (kept := self._look_up(query)) is not None:
            return kept
        outages: list[ToolUnavailableError] = []
        for url in self._in_turn():
            body = _Body(url, self._request_s)
            with _noting(url, outages):
                request = self._async_client().stream("POST", url, json=self._request(query))
                async with request as response:
                    async for chunk in response.aiter_raw():
                        body.add(chunk)
                    return self._read(query, response, body)
        raise outages[-1]

    def close(self) -> None:
        """Close the pooled connections and the cache."""
        self._client.close()
        self._clients.clear()  # their event loops have ended, and their connections with them
        if self.cache is not None:
            self.cache.close()

    def _in_turn(self) -> Sequence[str]:
        first = next(self._turns) % len(self.urls)
        return self.urls[first:] + self.urls[:first]

    def _request(self, query: str) -> dict[str, Any]:
        return {"queries": [query], "topk": self.top_k, "return_scores": True}

    def _look_up(self, query: str) -> ToolReply | None:
        key = (self._fingerprint or self.url, self.top_k, query)
        passages = None if self.cache is None else self.cache.get(key)
        return None if passages is None else format_passages(passages)._replace(cached=True)

    def _read(self, query: str, response: httpx.Response, body: _Body) -> ToolReply:
        passages = _read_passages(response, bytes(body.content))
        told = response.headers.get(FINGERPRINT_HEADER)
        if told and told != self._fingerprint:
            if self._fingerprint:
                logger.warning("%s searches another index now: %s", _shown(response.request.url), told)
            self._fingerprint = told
        if self.cache is not None:
            self.cache.put((told or self.url, self.top_k, query), passages)
        return format_passages(passages)

    def _async_client(self) -> httpx.AsyncClient:
        """The pool of the running event loop; those of loops that have ended are dropped."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            for ended in [other for other in self._clients if other.is_closed()]:
                del self._clients[ended]
            self._clients[loop] = httpx.AsyncClient(**self._options)
        return self._clients[loop]

    def _ask_fingerprint(self) -> bool:
        """Ask the servers in turn for the hash of their index; returns whether one has answered."""
        for url in map(httpx.URL, self.urls):
            health = url.copy_with(path=url.path.rpartition("/")[0] + "/health")
            body = _Body(health, self._request_s)
            try:
                with self._client.stream("GET", health) as response:
                    for chunk in response.iter_raw():
                        body.add(chunk)
                said = read_json(bytes(body.content))
                if said.get("ready") is False:
                    continue  # it does not know while it opens its index
                told = said.get("fingerprint")
            except (httpx.RemoteProtocolError, ToolUnavailableError, ValueError, AttributeError):
                told = ""
            except httpx.RequestError:
                continue
            self._fingerprint = told if isinstance(told, str) else ""
            return True
        return False


def check_query(query: str) -> str:
    """The query as valid text. Raises ToolInputError if it is longer than servers accept: the policy's fault."""
    if len(query) > MAX_QUERY_CHARS:
        raise ToolInputError(f"The query has {len(query)} characters, at most {MAX_QUERY_CHARS} are allowed.")
    return valid_text(query)


def _shown(url: str | httpx.URL) -> str:
    """An address without the token that may stand in it as the password: it goes into trajectories and manifests."""
    return str(httpx.URL(url).copy_with(userinfo=b""))


def _addresses(url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses in a list or separated by commas, with ``/retrieve`` added to those without a path."""
    found: list[str] = []
    for one in [text.strip() for text in (url.split(",") if isinstance(url, str) else url)] or [""]:
        parsed = http_address(one, "search_url", "http://127.0.0.1:8301/retrieve")
        found.append(str(parsed.copy_with(path="/retrieve") if parsed.path in ("", "/") else parsed))
    if len(set(found)) < len(found):
        raise UserError(f"search_url={url!r}: an address is given twice")
    return tuple(found)


class _Body:
    """Collects a reply's body, which may be neither larger than ``MAX_REPLY_BYTES`` nor slower than ``timeout_s``."""

    def __init__(self, url: str | httpx.URL, timeout_s: float) -> None:
        self._url = url
        self.content = bytearray()
        self._ends_at = time.monotonic() + timeout_s

    def add(self, chunk: bytes) -> None:
        """Add the next part. Raises ToolUnavailableError beyond the limits."""
        self.content += chunk
        if len(self.content) > MAX_REPLY_BYTES:
            raise ToolUnavailableError(
                f"{_shown(self._url)}: the reply has more than {MAX_REPLY_BYTES} bytes"
            )
        if time.monotonic() > self._ends_at:
            raise ToolUnavailableError(f"{_shown(self._url)}: the reply takes too long")


@contextmanager
def _noting(url: str, outages: list[ToolUnavailableError]) -> Iterator[None]:
    """Note an outage of the server, after which the next one is asked. All other errors pass."""
    try:
        yield
    except ToolUnavailableError as error:
        outages.append(error)
    except httpx.RequestError as error:
        outages.append(ToolUnavailableError(f"{_shown(url)}: {type(error).__name__}: {error}"))
        outages[-1].__cause__ = error


def _read_passages(response: httpx.Response, content: bytes) -> list[Passage]:
    status = response.status_code
    if 200 <= status < 300:
        try:
            (hits,) = read_json(content)["result"]
            return [Passage.from_row(hit["document"]) for hit in hits]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolUnavailableError(
                f"{_shown(response.request.url)} breaks the protocol: {content[:200].decode('utf-8', 'replace')!r}"
            ) from error
    said = f"{_shown(response.request.url)} answered {status}: {content[:200].decode('utf-8', 'replace')!r}"
    if status >= 500 or status in (408, 429):
        raise ToolUnavailableError(said)
    if status in (401, 403):
        raise ValueError(f"{said}; set {TOKEN_VARIABLE} to its token")
    raise ValueError(f"{said}; is search_url its /retrieve?")
