"""Queries per second of sorl-serve, next to BM25 in process and to a plain server.

- In process: tokenization and top-3 of whole batches, by bm25s with its numpy and its numba scorer, and by ours.
- sorl-serve with 64 clients that send eight queries a request, and with 64 that send one.
- A plain server (``plain_server.py``) with the same 64 clients of one query.

All in one run, by turns, medians of the rounds; the load generator is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
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

from load import read_questions
from servers import CORPUS, HERE, add_load_options, free_port, load, memory_mb, running, sorl_serve

from sorl_tools.corpus import read_corpus
from sorl_tools.index.bm25_scorer import BatchScorer
from sorl_tools.index.cached import build_index, tokenize

BATCH = 512
TOP_K = 3
WANTED_BATCHED, WANTED_SINGLE = 0.7, 3.0

Search = Callable[[list[str]], object]


def add_rate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]:
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--rounds", type=int, default=5)
    add_load_options(parser, seconds=5.0)
    return lambda args: (summarize(measure(args), args), False)


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
        "memory_mb": memory_mb(os.getpid()),
    }


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by contestant."""
    questions = read_questions(args.questions)
    searches = in_process(args.corpus)
    for search in searches.values():
        search(questions[:4])  # compiles
    rounds: dict[str, list[dict[str, float]]] = {}
    plain_port = free_port()
    plain = [str(HERE / "plain_server.py"), str(args.corpus), "--port", str(plain_port)]
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
                rounds.setdefault(name, []).append(rate(search, questions, args.seconds))
            for name, server, at, queries in servers:
                result = load(at, args.questions, args.seconds, args.connections, [queries])
                figures = {key: result[key] for key in ("queries_per_s", "p50_ms", "p99_ms", "errors")}
                rounds.setdefault(name, []).append({**figures, "memory_mb": memory_mb(server)})
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return {
        name: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for name, figures in rounds.items()
    }


def summarize(medians: dict[str, dict[str, float]], args: argparse.Namespace) -> dict[str, Any]:
    print(f"{'':36} {'queries/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'MB':>6} {'errors':>6}")
    for name, one in medians.items():
        numbers = (
            f"{one['queries_per_s']:10,.0f} {one['p50_ms']:8.1f} {one['p99_ms']:8.1f} {one['memory_mb']:6.0f}"
        )
        print(f"{name:36} {numbers} {one.get('errors', 0):6.0f}")
    rates = {name: one["queries_per_s"] for name, one in medians.items()}
    served, single, plain = (rates[name] for name in list(medians)[3:])
    batched = served / max(rates["bm25s, numpy"], rates["bm25s, numba"])
    own, to_plain = served / rates["sorl, numba"], single / plain
    print(
        f"\nserver to bm25s in process: {batched:.2f} (wanted: {WANTED_BATCHED:g}); to its own scorer: {own:.2f}"
    )
    print(f"one query a request, to the plain server: {to_plain:.1f} (wanted: {WANTED_SINGLE:g})")
    return {
        "medians": medians,
        "batched_to_in_process": batched,
        "batched_to_own_scorer": own,
        "single_to_plain": to_plain,
        "workers": args.workers,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("bm25s", "numba", "uvicorn")},
    }
