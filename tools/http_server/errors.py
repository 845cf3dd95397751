"""The error that a server answers a request with."""

from __future__ import annotations


class RequestError(Exception):
    """A request that is answered with ``status`` and the message.

    Attributes:
        retry_after_s: sent as Retry-After.
        closes: whether the connection ends with the answer: what follows cannot be told from a next request.
    """

    def __init__(
        self, status: int, message: str, *, retry_after_s: int | None = None, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.closes = closes
