"""Dynamic batching: one thread searches, and the requests that arrive during a search form the next batch."""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sorl_tools.http_server.errors import RequestError
from sorl_tools.index import Hit
from sorl_tools.serve.backend import Backend
from sorl_tools.serve.metrics import Metrics

Results = Sequence[Sequence[Hit]]


@dataclass(slots=True)
class _Waiting:
    """One request in the queue."""

    queries: Sequence[str]
    top_k: int
    future: asyncio.Future[Results]
    since: float = field(default_factory=time.monotonic)

    def settle(self, outcome: Results | RequestError) -> None:
        if self.future.done():
            return  # the client has left
        if isinstance(outcome, RequestError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Batcher:
    """A queue in front of a backend, which one thread opens and another one searches.

    A batch is never delayed to let it grow: a request that finds the thread idle is searched at once, and under load
    the batches grow by themselves.

    Args:
        open_backend: an exception that it raises becomes ``failure``.
        max_batch: most queries in one search; a single request may have more.
        max_waiting: most queries in the queue; further ones get 503 with Retry-After.
        timeout_s: a request that has waited longer gets 503 and is not searched.
        on_ready: called on a thread once the backend is open and warm, and once it cannot be opened.
    """

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        metrics: Metrics,
        *,
        max_batch: int = 512,
        max_waiting: int = 16384,
        timeout_s: float = 30.0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend: Backend | None = None
        self.failure: BaseException | None = None
        self.ready = False
        self._open_backend = open_backend
        self._metrics = metrics
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._on_ready = on_ready
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._num_waiting = 0
        self._draining: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "sorl-search")

    def start(self) -> None:
        """Start opening the backend, on a thread that does not keep the process alive."""
        threading.Thread(target=self._open, name="sorl-open", daemon=True).start()

    def _open(self) -> None:
        try:
            self.backend = backend = self._open_backend()
            self._thread.submit(backend.search, ["warm-up"], 1).result()
            self.ready = True
        except BaseException as error:  # noqa: BLE001  the server reports it and stops
            self.failure = error
        self._on_ready()

    async def search(self, queries: Sequence[str], top_k: int) -> Results:
        """The hits of each query of this request.

        Raises:
            RequestError: 503: the server is not ready, or has too much to do; 500: the search failed.
        """
        if not self.ready:
            raise RequestError(503, "the index is being opened", retry_after_s=1)
        if self._num_waiting + len(queries) > self._max_waiting:
            raise RequestError(503, f"{self._num_waiting} queries are waiting already", retry_after_s=1)
        one = _Waiting(queries, top_k, asyncio.get_running_loop().create_future())
        self._queue.append(one)
        self._num_waiting += len(queries)
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        return await one.future

    def close(self) -> None:
        """Close the backend. One that is still being opened is abandoned."""
        self._thread.shutdown()
        if self.ready and self.backend is not None:
            self.backend.close()

    async def _drain(self) -> None:
        """Search batch after batch until nothing waits."""
        while self._queue:
            batch = self._take()
            try:
                await self._serve(batch)
            except asyncio.CancelledError:  # the server has ended, and all requests with it
                raise
            except BaseException as error:  # noqa: BLE001  a batch that fails must not end the server
                self._metrics.failed(error)
                for one in batch:
                    one.settle(RequestError(500, f"the search failed: {type(error).__name__}"))

    def _take(self) -> list[_Waiting]:
        """A batch of requests from the queue, which is not empty."""
        batch: list[_Waiting] = []
        size = 0
        while self._queue and (not batch or size + len(self._queue[0].queries) <= self._max_batch):
            one = self._queue.popleft()
            size += len(one.queries)
            batch.append(one)
        self._num_waiting -= size
        self._metrics.waiting.set(self._num_waiting)
        return batch

    async def _serve(self, batch: list[_Waiting]) -> None:
        now = time.monotonic()
        in_time = []
        for one in batch:
            if now - one.since > self._timeout_s:
                one.settle(RequestError(503, "waited too long in the queue", retry_after_s=1))
            elif not one.future.done():
                in_time.append(one)
        if not in_time:
            return
        self._metrics.wait_s.observe(now - in_time[0].since)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._search, in_time)
        self._metrics.searched(len(found), time.monotonic() - now)
        for one in in_time:
            one.settle([found[query, one.top_k] for query in one.queries])

    def _search(self, batch: list[_Waiting]) -> dict[tuple[str, int], Sequence[Hit]]:
        """The hits by query and ``top_k``. A query that several requests ask, as the rollouts of a group do, is
        searched once.

        Each ``top_k`` has its own search, because it decides how deep a hybrid or a graph index looks: the best of many
        hits need not be the best of a few. What a request gets must not depend on the other requests in its batch.
        """
        assert self.backend is not None
        found: dict[tuple[str, int], Sequence[Hit]] = {}
        for top_k in sorted({one.top_k for one in batch}):
            queries = list(dict.fromkeys(q for one in batch if one.top_k == top_k for q in one.queries))
            if queries:
                hits = self.backend.search(queries, top_k)
                found.update({(query, top_k): some for query, some in zip(queries, hits, strict=True)})
        return found
