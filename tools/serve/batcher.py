"""Dynamic batching: one thread searches, and the requests that arrive during a search form the next batch.

The Prometheus metrics of a server are here as well; those of several workers are added up.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from sorl_tools.http_server.app import RequestError
from sorl_tools.index import Hit

logger = logging.getLogger(__name__)

NUM_QUERIES = "sorl.queries"  # in a request's scope: how many queries were searched for it
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counters of one process. ``prometheus_client`` reads ``PROMETHEUS_MULTIPROC_DIR`` when it is first imported.
    It is imported here and not at the top of the file, because the command sets that variable if there are several
    workers."""

    def __init__(self) -> None:
        import prometheus_client as prometheus
        from prometheus_client.multiprocess import MultiProcessCollector

        self.content_type: str = prometheus.CONTENT_TYPE_LATEST
        registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=registry)
        seconds = partial(prometheus.Histogram, registry=registry, buckets=_SECONDS)
        self.requests = counter("sorl_serve_requests", "Answers of /retrieve and /mcp by status", ["status"])
        self.queries = counter("sorl_serve_queries", "Queries answered")
        self.failures = counter("sorl_serve_search_failures", "Batches whose search raised")
        self.latency_s = seconds("sorl_serve_request_seconds", "Time to answer a request")
        self.search_s = seconds("sorl_serve_search_seconds", "Time to search a batch")
        self.batch_size = prometheus.Histogram(
            "sorl_serve_batch_queries", "Different queries in a batch", registry=registry, buckets=_SIZES
        )
        self.waiting = prometheus.Gauge(
            "sorl_serve_waiting_queries",
            "Queries in the queue",
            registry=registry,
            multiprocess_mode="livesum",
        )
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = prometheus.CollectorRegistry()
            MultiProcessCollector(registry)
        else:
            prometheus.ProcessCollector(registry=registry)
        self._expose = partial(prometheus.generate_latest, registry)

    def answered(self, status: int, num_queries: int, seconds: float) -> None:
        """Count one answer of ``/retrieve`` or ``/mcp``."""
        self.requests.labels(str(status)).inc()
        self.latency_s.observe(seconds)
        if status == 200:
            self.queries.inc(num_queries)

    def expose(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        return self._expose()


Results = Sequence[Sequence[Hit]]


@dataclass(slots=True)
class _Waiting:
    queries: Sequence[str]
    top_k: int
    future: asyncio.Future[Results]
    since: float = field(default_factory=time.monotonic)

    def refuse(self, error: RequestError) -> None:
        if not self.future.done():  # else the client has left
            self.future.set_exception(error)


class Batcher:
    """A queue in front of an index, which one thread searches. A batch is never delayed to let it grow: a request that
    finds the thread idle is searched at once, and under load the batches grow by themselves. One search has at most
    ``max_batch`` queries, unless a single request has more. Beyond ``max_waiting`` queries in the queue a request gets
    503 with Retry-After, and so does one that has waited longer than ``timeout_s``, which is not searched."""

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
        """The hits of each query. Raises RequestError: 503 if there is too much to do, 500 if the search failed."""
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
        searched once. Each ``top_k`` has its own search, because it decides how deep a hybrid or a graph index looks:
        the best of many hits need not be the best of a few. What a request gets must not depend on the other requests
        in its batch."""
        found: dict[tuple[str, int], Sequence[Hit]] = {}
        for top_k in sorted({one.top_k for one in batch}):
            queries = list(dict.fromkeys(q for one in batch if one.top_k == top_k for q in one.queries))
            if queries:
                hits = self._search_index(queries, top_k)
                found.update({(query, top_k): some for query, some in zip(queries, hits, strict=True)})
        return found
