"""Dynamic batching: one thread searches, and the requests that arrive during a search form the next batch."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sorl_tools.index import Hit
from sorl_tools.serve.backend import Backend
from sorl_tools.serve.metrics import Metrics
from sorl_tools.serve.protocol import RequestError

Results = Sequence[Sequence[Hit]]


@dataclass(slots=True)
class _Waiting:
    """One request in the queue."""

    queries: Sequence[str]
    top_k: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Results]
    deadline: float
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """A queue in front of a backend. One thread opens the backend, warms it up, searches and closes it.

    A batch is never delayed to let it grow: a request that finds the thread idle is searched at once, and under load
    the batches grow by themselves.

    Args:
        open_backend: called on the thread; an exception that it raises becomes ``failure``.
        max_batch: most queries in one search; a single request may have more.
        max_waiting: most queries in the queue; further ones get 503 with Retry-After.
        timeout_s: a request that has waited longer gets 503 and is not searched.
        on_ready: called on the thread once the backend is open and warm, and once it has failed.
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
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sorl-search", daemon=True)

    def start(self) -> None:
        """Start opening the backend."""
        self._thread.start()

    async def search(self, queries: Sequence[str], top_k: int) -> Results:
        """The hits of each query of this request.

        Raises:
            RequestError: 503: the server is not ready, has too much to do, or is stopping; 500: the search failed.
        """
        if not self.ready:
            raise RequestError(503, "the index is being opened", retry_after_s=1)
        loop = asyncio.get_running_loop()
        one = _Waiting(queries, top_k, loop, loop.create_future(), time.monotonic() + self._timeout_s)
        with self._changed:
            if self._closing:
                raise RequestError(503, "the server is stopping", retry_after_s=1)
            if self._num_waiting + len(queries) > self._max_waiting:
                raise RequestError(503, f"{self._num_waiting} queries are waiting already", retry_after_s=1)
            self._queue.append(one)
            self._num_waiting += len(queries)
            self._changed.notify()
        return await one.future

    def close(self) -> None:
        """Answer the requests in the queue, then close the backend. One that is still being opened is abandoned."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self.ready:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.backend = self._open_backend()
            self.backend.search(["warm-up"], 1)
            self.ready = True
            self._on_ready()
            while batch := self._take():
                self._serve(batch)
        except BaseException as error:  # noqa: BLE001  the server reports it and stops
            self._fail(error)
        if self.backend is not None:
            self.backend.close()

    def _fail(self, error: BaseException) -> None:
        """Nothing can be searched any more; the requests that wait are refused."""
        with self._changed:
            self.failure, self.ready, self._closing = error, False, True
            waiting, self._num_waiting = list(self._queue), 0
            self._queue.clear()
        _post([(one, RequestError(503, "the search has failed, and the server ends")) for one in waiting])
        self._on_ready()

    def _take(self) -> list[_Waiting]:
        """Wait for requests and take a batch of them; empty when the server is stopping and none is left."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            batch: list[_Waiting] = []
            size = 0
            while self._queue and (not batch or size + len(self._queue[0].queries) <= self._max_batch):
                one = self._queue.popleft()
                size += len(one.queries)
                batch.append(one)
            self._num_waiting -= size
            self._metrics.waiting.set(self._num_waiting)
        return batch

    def _serve(self, batch: list[_Waiting]) -> None:
        now = time.monotonic()
        late = [one for one in batch if one.deadline < now]
        _post([(one, RequestError(503, "waited too long in the queue", retry_after_s=1)) for one in late])
        batch = [one for one in batch if one.deadline >= now]
        if not batch:
            return
        self._metrics.wait_s.observe(now - batch[0].since)
        try:
            found = self._search(batch)
        except BaseException as error:  # noqa: BLE001  a batch that fails must not end the server
            self._metrics.failed(error)
            _post([(one, RequestError(500, f"the search failed: {type(error).__name__}")) for one in batch])
            return
        self._metrics.searched(len(found), time.monotonic() - now)
        _post([(one, [found[query, one.top_k] for query in one.queries]) for one in batch])

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


def _post(outcomes: list[tuple[_Waiting, Results | RequestError]]) -> None:
    """Pass outcomes to their event loop, waking it up once."""
    if not outcomes:
        return

    def settle() -> None:
        for one, outcome in outcomes:
            if one.future.done():
                continue  # the client has disconnected
            if isinstance(outcome, RequestError):
                one.future.set_exception(outcome)
            else:
                one.future.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the event loop has ended, so nobody waits any more
        outcomes[0][0].loop.call_soon_threadsafe(settle)
