"""sorl-serve under load from a process of its own: its rate next to the index in process, and a soak."""

from __future__ import annotations

import argparse
import asyncio
import bisect
import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sorl_tools.index import Index
from sorl_tools.index.build.build import open_bm25

SHARED = Path(os.environ.get("SORL_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
BATCH, TOP_K = 512, 3
SOAK_SIZES = (1, 8, 1, 32, 1, 3, 1, 16)  # queries of the requests, by turns
MAX_GROWTH, MAX_DRIFT = 0.05, 1.5

Figures = dict[str, Any]
Ask = Callable[[Sequence[int]], "Future[Figures]"]


def add_rate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[Figures, bool]]:
    parser.add_argument("--rounds", type=int, default=5)
    _add_options(parser, seconds=5.0)
    return rate


def add_soak(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[Figures, bool]]:
    _add_options(parser, seconds=300.0)
    return soak


def _add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    add = parser.add_argument
    add("--corpus", type=Path, default=SHARED / "corpus" / "wiki.jsonl.gz")
    add("--questions", type=Path, default=SHARED / "nq" / "test.jsonl.gz", help="a question per row")
    add("--seconds", type=float, default=seconds, help="of one measurement")
    add("--connections", type=int, default=64, help="clients at the same time")
    add("--workers", type=int, default=os.cpu_count() or 1, help="of sorl-serve")


def rate(args: argparse.Namespace) -> tuple[Figures, bool]:
    """Tokenization and top-3 of whole batches on one thread, and clients that send eight queries or one: by turns."""
    questions = read_questions(args.questions)
    index = open_bm25(args.corpus)[0]
    index.search(questions[:4], TOP_K)  # compiles
    rounds: dict[str, list[dict[str, float]]] = {}
    with sorl_serve(args) as (pid, ask):
        for _ in range(args.rounds):
            alone = in_process(index, questions, args.seconds)
            rounds.setdefault("in process", []).append(alone)
            for size in (8, 1):
                result = {**ask([size]).result(), "memory_mb": memory_mb(pid)}
                name = f"sorl-serve, {args.connections} clients of {size}"
                rounds.setdefault(name, []).append({key: result[key] for key in alone})
    medians = {
        name: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for name, figures in rounds.items()
    }
    for name, one in medians.items():
        print(f"{name:36}", ", ".join(f"{key} {value:,.1f}" for key, value in one.items()))
    return {"medians": medians, "workers": args.workers, "cpus": os.cpu_count()}, False


def in_process(index: Index, questions: list[str], seconds: float) -> dict[str, float]:
    done, started, times = 0, time.perf_counter(), []
    while time.perf_counter() - started < seconds:
        at = done % len(questions)
        batch = (questions[at:] + questions[:at])[:BATCH]
        before = time.perf_counter()
        index.search(batch, TOP_K)
        times.append(1e3 * (time.perf_counter() - before))
        done += len(batch)
    rate = done / (time.perf_counter() - started)
    latency = {"p50_ms": statistics.median(times), "p99_ms": p99(times)}
    return {"queries_per_s": rate, **latency, "memory_mb": memory_mb(os.getpid()), "errors": 0}


def soak(args: argparse.Namespace) -> tuple[Figures, bool]:
    """Requests of 1 to 32 queries without a pause; memory is sampled after the first tenth of the time."""
    samples: list[float] = []
    with sorl_serve(args) as (pid, ask):
        asked = ask(SOAK_SIZES)
        time.sleep(args.seconds / 10)
        while not asked.done() or not samples:
            samples.append(memory_mb(pid))
            time.sleep(min(1.0, args.seconds / 50))
        result = asked.result()
    tenth = max(1, len(samples) // 10)
    first, last = statistics.median(samples[:tenth]), statistics.median(samples[-tenth:])
    growth = last / first - 1
    drift = result["p99_ms_halves"][1] / result["p99_ms_halves"][0]
    print(f"{result['requests']:,} requests, {result['errors']} errors, p99 {result['p99_ms']:.1f} ms")
    print(f"{result['queries_per_s']:,.0f} queries a second, p50 {result['p50_ms']:.1f} ms")
    print(f"memory {first:.0f} MB to {last:.0f} MB: {growth:+.1%} (wanted: below {MAX_GROWTH:.0%})")
    print(f"p99 of the second half to the first: {drift:.2f} (wanted: at most {MAX_DRIFT:g})")
    figures = {**result, "memory_mb": [first, last], "memory_growth": growth, "p99_drift": drift}
    return figures, bool(result["errors"]) or growth >= MAX_GROWTH or drift > MAX_DRIFT


@contextmanager
def sorl_serve(args: argparse.Namespace) -> Iterator[tuple[int, Ask]]:
    """The server once all of its workers listen: its process id, and a function that puts load on it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--workers", str(args.workers)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sorl_tools.serve.cli", str(args.corpus), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while len({ready_worker(port) for _ in range(40)} - {None}) < args.workers:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("sorl-serve does not start")
            time.sleep(0.2)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            given = (args.questions, args.seconds, args.connections)
            yield process.pid, lambda sizes: pool.submit(load, port, sizes, *given)
    finally:
        process.terminate()
        process.wait(60)


def ready_worker(port: int) -> int | None:
    """The process id of the worker that answers, once its index is open."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
        said = json.load(response)
        return int(said["pid"]) if said["ready"] else None
    return None


def load(port: int, sizes: Sequence[int], questions: Path, seconds: float, connections: int) -> Figures:
    """What came of so many seconds of requests with these numbers of queries, by turns.

    It knows only as much of HTTP/1.1 as it needs: a client library would use more of the machine than the server.
    """
    endless = itertools.cycle(random.Random(0).sample(texts := read_questions(questions), len(texts)))
    counts = itertools.islice(itertools.cycle(sizes), 4096)
    requests = itertools.cycle([(request_bytes([next(endless) for _ in range(n)]), n) for n in counts])
    replies: list[tuple[float, float]] = []  # when each came, and after how many milliseconds
    statuses: Counter[int] = Counter()
    queries = broken = 0
    started = time.perf_counter()

    async def client() -> None:
        nonlocal queries, broken
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < started + seconds:
            data, count = next(requests)
            try:
                writer.write(data)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.findall(rb"content-length: *(\d+)", head.lower())[0]))
            except (OSError, asyncio.IncompleteReadError):
                broken += 1
                return
            now, status = time.perf_counter(), int(head[9:12])
            replies.append((now, 1e3 * (now - sent)))
            statuses[status] += 1
            queries += count if status == 200 else 0
        writer.close()

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(connections)))

    with suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(clients())
    wall = time.perf_counter() - started
    latencies = [latency for _, latency in replies]
    middle = bisect.bisect(replies, (started + seconds / 2, 0.0))
    return {
        "requests": len(replies),
        "queries_per_s": queries / wall,
        "p50_ms": statistics.median(latencies),
        "p99_ms": p99(latencies),
        "p99_ms_halves": [p99(latencies[:middle]), p99(latencies[middle:])],
        "statuses": {str(status): count for status, count in statuses.items()},
        "errors": len(replies) - statuses[200] + broken,
    }


def request_bytes(queries: list[str]) -> bytes:
    body = json.dumps({"queries": queries, "topk": TOP_K, "return_scores": True}).encode()
    lines = ["POST /retrieve HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def read_questions(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line in lines]


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def memory_mb(pid: int) -> float:
    """Memory of a process and its children; pages that they share count once (PSS)."""
    total = 0.0
    with suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        total += int(found[1]) / 1024 if found else 0.0
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        total += sum(memory_mb(int(child)) for child in children)
    return total
