"""The client's side of Search-R1's protocol: addresses, status codes and replies, none of which are trusted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sorl_env.errors import UserError
from sorl_env.text import read_json, valid_text
from sorl_env.tool import ToolInputError, ToolUnavailableError
from sorl_tools.corpus import Passage

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "SORL_SEARCH_TOKEN"
MAX_QUERY_CHARS = 4096  # servers refuse a longer query with the status of a wrong address
MAX_PORT = 65535
MAX_REPLY_BYTES = 16 << 20  # servers send some kilobytes


def addresses(url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses in a list or separated by commas, with ``/retrieve`` added to those without a path.

    Raises:
        UserError: one is not an http or https address, or is given twice.
    """
    import httpx

    given = url.split(",") if isinstance(url, str) else list(url)
    if not given:
        raise UserError("search_url=[]: give an address such as http://127.0.0.1:8301/retrieve")
    found: list[str] = []
    for one in (text.strip() for text in given):
        try:
            parsed = httpx.URL(one)
        except httpx.InvalidURL as error:
            raise UserError(f"search_url={one!r}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"search_url={one!r}: give an address such as http://127.0.0.1:8301/retrieve")
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


class Body:
    """Collects a reply's body, as it is sent.

    Raises:
        ToolUnavailableError: when added to: it has more than ``MAX_REPLY_BYTES``, or takes longer than ``timeout_s``.
    """

    def __init__(self, url: Any, timeout_s: float) -> None:
        self._url = url
        self.content = bytearray()
        self._ends_at = time.monotonic() + timeout_s

    def add(self, chunk: bytes) -> None:
        """Add the next part."""
        self.content += chunk
        if len(self.content) > MAX_REPLY_BYTES:
            raise ToolUnavailableError(f"{self._url}: the reply has more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > self._ends_at:
            raise ToolUnavailableError(f"{self._url}: the reply takes too long")


def read_passages(response: httpx.Response, content: bytes | bytearray) -> list[Passage]:
    """The passages that a server found for one query.

    Raises:
        ToolUnavailableError: 5xx, 408, 429, or a reply that breaks the protocol: the server has a problem.
        ValueError: another status but 2xx: the request, the token or the address is wrong.
    """
    status, url = response.status_code, response.request.url
    quoted = repr(content[:200].decode("utf-8", "replace"))
    if status >= 500 or status in (408, 429):
        raise ToolUnavailableError(f"{url} answered {status}: {quoted}")
    if status in (401, 403):
        raise ValueError(f"{url} answered {status}: {quoted}; set {TOKEN_VARIABLE} to its token")
    if not 200 <= status < 300:
        raise ValueError(f"{url} answered {status}: {quoted}; is search_url its /retrieve?")
    try:
        (hits,) = read_json(bytes(content))["result"]
        return [Passage.from_row(hit["document"]) for hit in hits]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolUnavailableError(f"{url} breaks the protocol: {quoted}") from error
