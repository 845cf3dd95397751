"""Dynamic batching: one thread searches, and the requests that arrive during a search form the next batch."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sorl_tools.http_server.app import RequestError
from sorl_tools.index import Hit
from sorl_tools.serve.metrics import Metrics

logger = logging.getLogger(__name__)

Results = Sequence[Sequence[Hit]]


@dataclass(slots=True)
class _Waiting:
    """One request in the queue."""

    queries: Sequence[str]
    top_k: int
    future: asyncio.Future[Results]
    since: float = field(default_factory=time.monotonic)

    def refuse(self, error: RequestError) -> None:
        if not self.future.done():  # else the client has left
            self.future.set_exception(error)


class Batcher:
    """A queue in front of an index, which one thread searches.

    A batch is never delayed to let it grow: a request that finds the thread idle is searched at once, and under load
    the batches grow by themselves.

    Args:
        search: the hits of each query, for a number of passages.
        max_batch: most queries in one search; a single request may have more.
        max_waiting: most queries in the queue; further ones get 503 with Retry-After.
        timeout_s: a request that has waited longer gets 503 and is not searched.
    """

    def __init__(
        self,
        search: Callable[[Sequence[str], int], Results],
        metrics: Metrics,
        *,
        max_batch: int = 512,
        max_waiting: int = 16384,
        timeout_s: float = 30.0,
    ) -> None:
        self._search_index = search
        self._metrics = metrics
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._num_waiting = 0
        self._draining: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "sorl-search")

    async def search(self, queries: Sequence[str], top_k: int) -> Results:
        """The hits of each query of this request.

        Raises:
            RequestError: 503: the server has too much to do; 500: the search failed.
        """
        if self._num_waiting + len(queries) > self._max_waiting:
            raise RequestError(503, f"{self._num_waiting} queries are waiting already", retry_after_s=1)
        one = _Waiting(queries, top_k, asyncio.get_running_loop().create_future())
        self._queue.append(one)
        self._num_waiting += len(queries)
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        return await one.future

    def close(self) -> None:
        """Wait for the search in progress."""
        self._thread.shutdown()

    async def _drain(self) -> None:
        """Search batch after batch until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch, started = self._take(), time.monotonic()
            try:
                found = await loop.run_in_executor(self._thread, self._search, batch)
            except asyncio.CancelledError:  # the server has ended, and all requests with it
                raise
            except BaseException as error:
                self._metrics.failures.inc()
                logger.error("the search raised", exc_info=error)
                for one in batch:
                    one.refuse(RequestError(500, f"the search failed: {type(error).__name__}"))
                continue
            self._metrics.batch_size.observe(len(found))
            self._metrics.search_s.observe(time.monotonic() - started)
            for one in batch:
                if not one.future.done():
                    one.future.set_result([found[query, one.top_k] for query in one.queries])

    def _take(self) -> list[_Waiting]:
        """A batch of requests from the queue, without those that have waited too long or whose client has left."""
        batch: list[_Waiting] = []
        size, now = 0, time.monotonic()
        while self._queue and (not batch or size + len(self._queue[0].queries) <= self._max_batch):
            one = self._queue.popleft()
            self._num_waiting -= len(one.queries)
            if now - one.since > self._timeout_s:
                one.refuse(RequestError(503, "waited too long in the queue", retry_after_s=1))
            elif not one.future.done():
                size += len(one.queries)
                batch.append(one)
        self._metrics.waiting.set(self._num_waiting)
        return batch

    def _search(self, batch: list[_Waiting]) -> dict[tuple[str, int], Sequence[Hit]]:
        """The hits by query and ``top_k``. A query that several requests ask, as the rollouts of a group do, is
        searched once.

        Each ``top_k`` has its own search, because it decides how deep a hybrid or a graph index looks: the best of many
        hits need not be the best of a few. What a request gets must not depend on the other requests in its batch.
        """
        found: dict[tuple[str, int], Sequence[Hit]] = {}
        for top_k in sorted({one.top_k for one in batch}):
            queries = list(dict.fromkeys(q for one in batch if one.top_k == top_k for q in one.queries))
            if queries:
                hits = self._search_index(queries, top_k)
                found.update({(query, top_k): some for query, some in zip(queries, hits, strict=True)})
        return found
