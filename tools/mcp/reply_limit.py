"""An HTTP client that reads a limited number of bytes of each reply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

MAX_REPLY_BYTES = 16 << 20  # a policy reads some kilobytes of it
_TIMEOUT_S = 3600.0  # the deadline of each call is kept by the caller


def limited_http_client(token: str | None) -> httpx2.AsyncClient:
    """A client whose replies end with an error after ``MAX_REPLY_BYTES``.

    Args:
        token: sent as ``Authorization: Bearer``, if given.
    """
    import httpx2

    class LimitedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in self._stream:
                size += len(chunk)
                if size > MAX_REPLY_BYTES:
                    raise httpx2.StreamError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    class LimitedTransport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            response = await super().handle_async_request(request)
            # a small compressed body can unpack to any size; requests ask for plain ones
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                raise httpx2.RemoteProtocolError(
                    "the reply is compressed, although a plain one was asked for"
                )
            response.stream = LimitedStream(response.stream)
            return response

    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx2.AsyncClient(
        transport=LimitedTransport(limits=limits),
        headers=headers,
        timeout=httpx2.Timeout(_TIMEOUT_S, connect=5.0),
    )
