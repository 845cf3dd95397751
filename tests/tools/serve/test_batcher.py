"""What a request gets does not hang on which others share its batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sorl_tools.corpus import Passage
from sorl_tools.http_server.app import RequestError
from sorl_tools.index import Hit
from sorl_tools.serve.batcher import Batcher, Metrics


class Deep:
    """As a hybrid index: how many candidates it looks at hangs on ``top_k``, and the order of the best on them."""

    def __init__(self) -> None:
        self.searched: list[tuple[list[str], int]] = []
        self.too_few = False
        self.go = threading.Event()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.searched.append((list(queries), top_k))
        if "hold" in queries:
            assert self.go.wait(30)
        found = [hits(query, top_k) for query in queries]
        return found[1:] if self.too_few else found


def hits(query: str, top_k: int) -> list[Hit]:
    return [Hit(Passage(str(i), query, f"{top_k}"), float(top_k - i)) for i in range(top_k)]


@contextmanager
def batching(index: Deep) -> Iterator[Batcher]:
    batcher = Batcher(index.search, Metrics())
    yield batcher
    batcher.close()


def test_each_request_gets_what_it_would_get_alone() -> None:
    rng = np.random.default_rng(0)
    requests = [
        ([f"q{i}" for i in rng.integers(6, size=rng.integers(4))], int(rng.choice([1, 3, 200])))
        for _ in range(60)
    ]
    backend = Deep()

    async def ask_all(batcher: Batcher) -> list[Any]:
        held = asyncio.ensure_future(batcher.search(["hold"], 1))
        while not backend.searched:
            await asyncio.sleep(0.001)
        asked = [asyncio.ensure_future(batcher.search(*request)) for request in requests]
        await asyncio.sleep(0)
        backend.go.set()
        await held
        return await asyncio.gather(*asked)

    with batching(backend) as batcher:
        found = asyncio.run(ask_all(batcher))
    for (queries, top_k), got in zip(requests, found, strict=True):
        assert got == [hits(query, top_k) for query in queries]
    together = backend.searched[1:]
    assert sorted(top_k for _, top_k in together) == [1, 3, 200]  # one batch, a search for each
    assert all(len(set(queries)) == len(queries) for queries, _ in together)


def test_a_backend_that_loses_a_query_fails_its_batch_and_no_other() -> None:
    """An answer less than there are queries would give each query its neighbour's passages."""
    backend = Deep()

    async def ask(batcher: Batcher) -> Any:
        return await asyncio.wait_for(batcher.search(["a", "b"], 3), 30)

    with batching(backend) as batcher:
        backend.too_few = True
        with pytest.raises(RequestError, match="the search failed"):
            asyncio.run(ask(batcher))
        backend.too_few = False
        assert asyncio.run(ask(batcher)) == [hits("a", 3), hits("b", 3)]


def test_a_backend_that_ends_python_fails_its_batch_and_no_other() -> None:
    def search(queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        if queries == ["leave"]:
            raise SystemExit(0)
        return [hits(query, top_k) for query in queries]

    batcher = Batcher(search, Metrics())
    with pytest.raises(RequestError, match="the search failed: SystemExit"):
        asyncio.run(batcher.search(["leave"], 1))
    assert asyncio.run(batcher.search(["a"], 3)) == [hits("a", 3)]
    batcher.close()
