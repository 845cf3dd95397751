"""The client's side of Search-R1's protocol: addresses, status codes and replies, none of which are trusted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from sorl_env.errors import UserError
from sorl_env.text import read_json, valid_text
from sorl_env.tool import ToolInputError, ToolUnavailableError
from sorl_tools.corpus import Passage

TOKEN_VARIABLE = "SORL_SEARCH_TOKEN"
# What servers accept. They refuse a whole request that holds a longer query, with the status of a wrong address.
MAX_QUERIES = 256
MAX_QUERY_CHARS = 4096
MAX_REQUEST_BYTES = 1 << 19
# Limits on a reply's body. A policy reads some kilobytes of it, and no passage is a quarter of a megabyte long.
MAX_REPLY_BYTES = 64 << 20
MAX_PASSAGE_BYTES = 1 << 18
MAX_HEALTH_BYTES = 1 << 16
MAX_PORT = 65535


class Answer(NamedTuple):
    """A server's answer, as far as it was read."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


def addresses(url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses in a list or separated by commas, with ``/retrieve`` added to those without a path.

    Raises:
        UserError: one is not an http or https address, or is given twice.
    """
    import httpx

    given = url.split(",") if isinstance(url, str) else list(url)
    if not given:
        raise UserError("search_url=[]: give an address such as http://127.0.0.1:8000/retrieve")
    found: list[str] = []
    for one in (text.strip() for text in given):
        try:
            parsed = httpx.URL(one)
        except httpx.InvalidURL as error:
            raise UserError(f"search_url={one!r}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"search_url={one!r}: give an address such as http://127.0.0.1:8000/retrieve")
        # the system would take the remainder of a division by 65536 for the port
        if parsed.port is not None and not 0 < parsed.port <= MAX_PORT:
            raise UserError(f"search_url={one!r}: a port lies between 1 and {MAX_PORT}, it is {parsed.port}")
        found.append(str(parsed.copy_with(path="/retrieve") if parsed.path in ("", "/") else parsed))
    if len(set(found)) < len(found):
        raise UserError(f"search_url={url!r}: an address is given twice")
    return tuple(found)


def check_query(query: str) -> str:
    """The query as valid text.

    Raises:
        ToolInputError: it is longer than servers accept, which is the policy's fault and not an outage.
    """
    if len(query) > MAX_QUERY_CHARS:
        raise ToolInputError(f"The query has {len(query)} characters, at most {MAX_QUERY_CHARS} are allowed.")
    return valid_text(query)


def checked(query: str) -> str | ToolInputError:
    """``check_query`` with its error as a value, for one slot of a batch."""
    try:
        return check_query(query)
    except ToolInputError as error:
        return error


def split_queries(queries: Sequence[str]) -> list[list[str]]:
    """The queries in parts, each of which fits into one request."""
    parts: list[list[str]] = []
    size = 0
    for query in queries:
        more = len(json.dumps(query))
        if not parts or len(parts[-1]) == MAX_QUERIES or size + more > MAX_REQUEST_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(query)
        size += more
    return parts


def max_reply_bytes(queries: int, top_k: int) -> int:
    """The most bytes that are read of a reply to ``queries`` queries with ``top_k`` passages each."""
    return min(MAX_REPLY_BYTES, MAX_PASSAGE_BYTES * (1 + queries * top_k))


class Body:
    """Collects a reply's body. A server whose reply does not end in time, or is too long, counts as unavailable.

    Args:
        headers: of the reply. A compressed body is refused, because a small one can unpack to any size; requests ask
            for uncompressed replies.
        most: the most bytes that are read.
        ends_at: the deadline on the clock ``time.monotonic()``.

    Raises:
        ToolUnavailableError: here or in ``add``: the body is compressed, too long or too slow.
    """

    def __init__(self, url: str, headers: Mapping[str, str], most: int, ends_at: float) -> None:
        self._url = url
        self._most = most
        self._ends_at = ends_at
        self._read = bytearray()
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ToolUnavailableError(f"{url} breaks the protocol: a reply in {encoding!r}, not identity")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            self._refuse_length()

    def add(self, chunk: bytes) -> None:
        """Add the next part."""
        if len(self._read) + len(chunk) > self._most:
            self._refuse_length()
        if time.monotonic() > self._ends_at:
            raise ToolUnavailableError(f"{self._url}: ReadTimeout: the reply takes too long")
        self._read += chunk

    def __bytes__(self) -> bytes:
        return bytes(self._read)

    def _refuse_length(self) -> None:
        raise ToolUnavailableError(
            f"{self._url} breaks the protocol: its reply has more than {self._most} bytes, the limit of "
            f"{MAX_PASSAGE_BYTES} for each passage asked for; index shorter passages"
        )


def parse(answer: Answer, count: int) -> list[list[Passage]]:
    """The passages for each of ``count`` queries. Raises ToolUnavailableError if the reply breaks the protocol."""
    try:
        results = read_json(answer.body)["result"]
        found = [[Passage.from_row(hit["document"]) for hit in hits] for hits in results]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolUnavailableError(f"{answer.url} breaks the protocol: {_quote(answer)}") from error
    if len(found) != count:
        raise ToolUnavailableError(f"{answer.url} sent {len(found)} results for {count} queries")
    return found


def check_status(answer: Answer) -> None:
    """Raise ToolUnavailableError if the server has a problem, and ValueError if the request is wrong."""
    if answer.status >= 500 or answer.status in (408, 429):
        raise ToolUnavailableError(f"{answer.url} answered {answer.status}: {_quote(answer)}")
    if answer.status in (401, 403):
        raise ValueError(
            f"{answer.url} answered {answer.status}: {_quote(answer)}; set {TOKEN_VARIABLE} to its token"
        )
    if not 200 <= answer.status < 300:
        raise ValueError(
            f"{answer.url} answered {answer.status}: {_quote(answer)}; is search_url its /retrieve?"
        )


def retry_after_s(answer: Answer) -> float | None:
    """The seconds in a Retry-After header, which holds seconds or a date; None without one."""
    text = answer.headers.get("retry-after")
    if text is None or answer.status not in (429, 503):
        return None
    try:
        return max(0.0, float(text) if text.strip().isdigit() else _until(text))
    except (ValueError, TypeError):
        return None


def _until(date: str) -> float:
    return parsedate_to_datetime(date).timestamp() - time.time()


def _quote(answer: Answer) -> str:
    return repr(answer.body[:200].decode("utf-8", "replace"))
