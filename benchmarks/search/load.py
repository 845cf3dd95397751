"""A load generator for retrieval servers, in one process: many keep-alive connections, each with one request at a time.

It implements only as much of HTTP/1.1 as it needs: a client library would use more of the machine than the server under
test. It prints one JSON object; ``servers.load`` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import gzip
import itertools
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def request_bytes(queries: list[str], top_k: int) -> bytes:
    body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
    lines = ["POST /retrieve HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Load:
    """What all connections share: the requests to send, and what came of them."""

    def __init__(self, requests: Iterator[tuple[bytes, int]], ends_at: float) -> None:
        self.requests = requests
        self.ends_at = ends_at
        # when each reply came, and after how many seconds; arrays, because a long run has millions of them
        self.times = array("d")
        self.latencies = array("d")
        self.queries = 0
        self.statuses: Counter[int] = Counter()
        self.broken = 0


class Connection(asyncio.Protocol):
    """One client: sends a request, waits for its reply, sends the next."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self._load.ends_at:
            self._transport.close()
            return
        data, self._queries = next(self._load.requests)
        self._parts: list[bytes] = []
        self._missing = -1  # bytes of the reply, unknown until its head is here
        self._sent = time.perf_counter()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing < 0:
            data = b"".join(self._parts)
            head = data.find(b"\r\n\r\n")
            if head < 0:
                return
            at = data.lower().index(b"content-length:", 0, head) + 15
            self._missing = head + 4 + int(data[at : data.index(b"\r", at)]) - len(data)
            self._status = int(data[9:12])
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            self._finish()

    def _finish(self) -> None:
        load, now = self._load, time.perf_counter()
        load.statuses[self._status] += 1
        load.times.append(now)
        load.latencies.append(now - self._sent)
        load.queries += self._queries if self._status == 200 else 0
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if time.perf_counter() < self._load.ends_at:
            self._load.broken += 1
        if not self.finished.done():
            self.finished.set_result(None)


async def run(load: Load, port: int, connections: int) -> None:
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", port) for _ in range(connections)
    ]
    await asyncio.gather(*(protocol.finished for _, protocol in made))


def read_questions(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line in lines]


def plan(texts: list[str], sizes: list[int], top_k: int) -> Iterator[tuple[bytes, int]]:
    """Requests for ever, of the given sizes by turns, over all questions in a shuffled order."""
    texts = random.Random(0).sample(texts, len(texts))
    endless = itertools.cycle(texts)
    chosen = [
        [next(endless) for _ in range(size)]
        for _, size in zip(range(4096), itertools.cycle(sizes), strict=False)
    ]
    return itertools.cycle([(request_bytes(queries, top_k), len(queries)) for queries in chosen])


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--questions", type=Path, required=True, help=".jsonl.gz with a question per row")
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument(
        "--queries", type=int, nargs="+", required=True, help="per request; several sizes take turns"
    )
    parser.add_argument("--top_k", type=int, default=3)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    requests = plan(read_questions(args.questions), args.queries, args.top_k)
    started = time.perf_counter()
    load = Load(requests, started + args.seconds)
    asyncio.run(run(load, args.port, args.connections))
    wall = time.perf_counter() - started
    middle = bisect.bisect(load.times, started + args.seconds / 2)
    latencies = [1e3 * seconds for seconds in load.latencies]
    figures = {
        "requests": len(latencies),
        "queries_per_s": load.queries / wall,
        "requests_per_s": len(latencies) / wall,
        "p50_ms": percentile(latencies, 0.5),
        "p99_ms": percentile(latencies, 0.99),
        "p99_ms_halves": [percentile(half, 0.99) for half in (latencies[:middle], latencies[middle:])],
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "broken": load.broken,
        "cpu_s": time.process_time(),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
