"""Queries per second of sorl-serve, next to BM25 in process and to a plain server.

- In process: tokenization and top-3 of whole batches, by bm25s with its numpy and its numba scorer, and by ours.
- sorl-serve with 64 clients that send eight queries a request, and with 64 that send one.
- A plain server (``search_plain_server.py``) with the same 64 clients of one query.

All in one run, by turns, medians of the rounds; the load generator is a process of its own.

    python benchmarks/search.py --json search.json
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # a second thread makes numba's scorer slower, not faster
os.environ.setdefault("OMP_NUM_THREADS", "1")

from search_servers import CORPUS, QUESTIONS, free_port, load, memory_mb, running, sorl_serve

from sorl_tools.corpus import read_corpus
from sorl_tools.index.bm25_scorer import BatchScorer
from sorl_tools.index.cached import build_index, tokenize

BATCH = 512
TOP_K = 3
WANTED_BATCHED, WANTED_SINGLE = 0.7, 3.0

Search = Callable[[list[str]], object]


def in_process(corpus: Path) -> dict[str, Search]:
    """Searches of a batch, by name."""
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = build_index(list(read_corpus(corpus)))
    scorer = BatchScorer(index)

    def with_bm25s(backend: str) -> Search:
        options = {"n_threads": 1, "backend_selection": "numba"} if backend == "numba" else {}

        def search(batch: list[str]) -> object:
            index.backend = backend
            return index.retrieve(tokenize(batch), k=TOP_K, show_progress=False, **options)

        return search

    return {
        "bm25s, numpy": with_bm25s("numpy"),
        "bm25s, numba": with_bm25s("numba"),
        "sorl, numba": lambda batch: scorer.top(tokenize(batch), TOP_K),
    }


def rate(search: Search, questions: list[str], seconds: float) -> dict[str, float]:
    """Queries per second of batches, one after another."""
    done, started = 0, time.perf_counter()
    times: list[float] = []
    while time.perf_counter() - started < seconds:
        at = done % len(questions)
        batch = (questions[at:] + questions[:at])[:BATCH]
        before = time.perf_counter()
        search(batch)
        times.append(time.perf_counter() - before)
        done += len(batch)
    times.sort()
    return {
        "queries_per_s": done / (time.perf_counter() - started),
        "p50_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * times[int(0.99 * len(times))],
    }


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by contestant."""
    with gzip.open(args.questions, "rt", encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines]
    searches = in_process(args.corpus)
    for search in searches.values():
        search(questions[:4])  # compiles
    rounds: dict[str, list[dict[str, float]]] = {}
    plain_port = free_port()
    plain = [
        str(Path(__file__).with_name("search_plain_server.py")),
        str(args.corpus),
        "--port",
        str(plain_port),
    ]
    with contextlib.ExitStack() as stack:
        pid, port = stack.enter_context(sorl_serve(args.corpus, args.workers))
        plain_pid = stack.enter_context(running(plain, plain_port, "/health"))
        servers = [
            (f"sorl-serve, {args.connections} clients of 8", pid, port, 8),
            (f"sorl-serve, {args.connections} clients of 1", pid, port, 1),
            (f"plain server, {args.connections} clients of 1", plain_pid, plain_port, 1),
        ]
        for number in range(args.rounds):
            for name, search in searches.items():
                figures = rate(search, questions, args.seconds)
                rounds.setdefault(name, []).append(figures | {"memory_mb": memory_mb(os.getpid())})
            for name, server, at, queries in servers:
                result = load(at, args.questions, args.seconds, args.connections, [queries])
                wrong = sum(result["statuses"].values()) - result["statuses"].get("200", 0) + result["broken"]
                figures = {key: result[key] for key in ("queries_per_s", "p50_ms", "p99_ms")}
                rounds.setdefault(name, []).append(
                    figures | {"memory_mb": memory_mb(server), "errors": wrong}
                )
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return {
        name: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for name, figures in rounds.items()
    }


def summarize(medians: dict[str, dict[str, float]], args: argparse.Namespace) -> dict[str, Any]:
    print(f"{'':36} {'queries/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'MB':>6} {'errors':>6}")
    for name, one in medians.items():
        columns = (
            f"{one['queries_per_s']:10,.0f} {one['p50_ms']:8.1f} {one['p99_ms']:8.1f} {one['memory_mb']:6.0f}"
        )
        print(f"{name:36} {columns} {one.get('errors', 0):6.0f}")
    rates = {name: one["queries_per_s"] for name, one in medians.items()}
    best = max(rates[name] for name in ("bm25s, numpy", "bm25s, numba"))
    batched = rates[f"sorl-serve, {args.connections} clients of 8"] / best
    to_own = rates[f"sorl-serve, {args.connections} clients of 8"] / rates["sorl, numba"]
    single = (
        rates[f"sorl-serve, {args.connections} clients of 1"]
        / rates[f"plain server, {args.connections} clients of 1"]
    )
    print(
        f"\nserver to bm25s in process: {batched:.2f} (wanted: {WANTED_BATCHED:g}); to its own scorer: {to_own:.2f}"
    )
    print(f"one query a request, to the plain server: {single:.1f} (wanted: {WANTED_SINGLE:g})")
    return {
        "medians": medians,
        "batched_to_in_process": batched,
        "batched_to_own_scorer": to_own,
        "single_to_plain": single,
        "workers": args.workers,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("bm25s", "numba", "uvicorn")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help=".jsonl.gz with a question a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one contestant in one round")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of sorl-serve")
    args = parser.parse_args()
    figures = summarize(measure(args), args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
