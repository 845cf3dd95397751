"""Search-R1's protocol on the client's side: addresses, status codes and replies, none of them trusted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from sorl_env.errors import UserError
from sorl_env.tool import ToolUnavailableError
from sorl_tools.corpus import Passage

TOKEN_VARIABLE = "SORL_SEARCH_TOKEN"
MAX_REPLY_BYTES = 64 << 20


class Answer(NamedTuple):
    """What a server said, as far as it was read."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


def addresses(url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses in a list or between commas, ``/retrieve`` added to those without a path.

    Raises:
        UserError: one is no http or https address, or is there twice.
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
        found.append(str(parsed.copy_with(path="/retrieve") if parsed.path in ("", "/") else parsed))
    if len(set(found)) < len(found):
        raise UserError(f"search_url={url!r}: an address is given twice")
    return tuple(found)


def clean(query: str) -> str:
    """Half a character, which a sampler can draw, is no UTF-8."""
    return query.encode("utf-8", "replace").decode("utf-8")


def grow(body: bytearray, chunk: bytes, url: str, ends_at: float) -> None:
    """Add to a reply that must end: a server that drips or pours for ever is out."""
    body += chunk
    if len(body) > MAX_REPLY_BYTES:
        raise ToolUnavailableError(f"{url} breaks the protocol: a reply above {MAX_REPLY_BYTES} bytes")
    if time.monotonic() > ends_at:
        raise ToolUnavailableError(f"{url}: ReadTimeout: the reply takes too long")


def parse(answer: Answer, count: int) -> list[list[Passage]]:
    """The passages of each of ``count`` queries; ToolUnavailableError for a reply that breaks the protocol."""
    try:
        results = json.loads(answer.body)["result"]
        found = [[Passage.from_row(hit["document"]) for hit in hits] for hits in results]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ToolUnavailableError(f"{answer.url} breaks the protocol: {_quote(answer)}") from error
    if len(found) != count:
        raise ToolUnavailableError(f"{answer.url} sent {len(found)} results for {count} queries")
    return found


def check_status(answer: Answer) -> None:
    """Raise ToolUnavailableError for a server in trouble, ValueError for a request that is wrong."""
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
    """Seconds of a Retry-After header, which holds seconds or a date."""
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
