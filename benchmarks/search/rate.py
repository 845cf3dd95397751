"""Queries per second of sorl-serve, next to the same index in process.

In process: tokenization and top-3 of whole batches, on one thread. sorl-serve: 64 clients that send eight queries a
request, and 64 that send one. By turns, medians of the rounds; the load generator is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load import read_questions
from servers import CORPUS, add_load_options, load, memory_mb, sorl_serve

from sorl_tools.index.cached import open_bm25

BATCH, TOP_K = 512, 3


def add_rate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]:
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--rounds", type=int, default=5)
    add_load_options(parser, seconds=5.0)
    return measure


def in_process(
    search: Callable[[list[str]], object], questions: list[str], seconds: float
) -> dict[str, float]:
    """Queries per second of batches, one after another."""
    done, started, times = 0, time.perf_counter(), []
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
        "errors": 0,
    }


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Medians over the rounds, by contestant."""
    questions = read_questions(args.questions)
    index = open_bm25(args.corpus)[0]
    index.search(questions[:4], TOP_K)  # compiles
    rounds: dict[str, list[dict[str, float]]] = {}
    with sorl_serve(args.corpus, args.workers) as (pid, port):
        for _ in range(args.rounds):
            alone = in_process(lambda batch: index.search(batch, TOP_K), questions, args.seconds)
            rounds.setdefault("in process", []).append(alone)
            for size in (8, 1):
                result = load(port, args.questions, args.seconds, args.connections, [size])
                figures = {key: result[key] for key in alone if key != "memory_mb"} | {
                    "memory_mb": memory_mb(pid)
                }
                rounds.setdefault(f"sorl-serve, {args.connections} clients of {size}", []).append(figures)
    medians = {
        name: {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        for name, figures in rounds.items()
    }
    print(f"{'':36} {'queries/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'MB':>6} {'errors':>6}")
    for name, one in medians.items():
        latency = f"{one['p50_ms']:8.1f} {one['p99_ms']:8.1f}"
        print(
            f"{name:36} {one['queries_per_s']:10,.0f} {latency} {one['memory_mb']:6.0f} {one['errors']:6.0f}"
        )
    return {"medians": medians, "workers": args.workers, "cpus": os.cpu_count()}, False
