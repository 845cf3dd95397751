"""sorl-serve under load: minutes of mixed requests."""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers import CORPUS, add_load_options, load, memory_mb, sorl_serve

SIZES = (1, 8, 1, 32, 1, 3, 1, 16)  # queries of the requests, by turns
MAX_GROWTH, MAX_DRIFT = 0.05, 1.5

Measure = Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]


def add_soak(parser: argparse.ArgumentParser) -> Measure:
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    add_load_options(parser, seconds=300.0)
    return soak


def soak(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Requests of 1 to 32 queries without a pause; memory is sampled after the first tenth of the time."""
    samples: list[float] = []
    ended = threading.Event()
    with sorl_serve(args.corpus, args.workers) as (pid, port):

        def watch() -> None:
            ended.wait(args.seconds / 10)
            while not ended.is_set():
                samples.append(memory_mb(pid))
                ended.wait(min(1.0, args.seconds / 50))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            result = load(port, args.questions, args.seconds, args.connections, SIZES)
        finally:
            ended.set()
            watcher.join()
    tenth = max(1, len(samples) // 10)
    first, last = statistics.median(samples[:tenth]), statistics.median(samples[-tenth:])
    growth = last / first - 1
    drift = result["p99_ms_halves"][1] / result["p99_ms_halves"][0]
    print(
        f"{result['requests']:,} requests, {result['requests_per_s']:,.0f} a second, {result['errors']} errors"
    )
    p50, p99 = result["p50_ms"], result["p99_ms"]
    print(f"{result['queries_per_s']:,.0f} queries a second, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"memory {first:.0f} MB to {last:.0f} MB: {growth:+.1%} (wanted: below {MAX_GROWTH:.0%})")
    print(f"p99 of the second half to the first: {drift:.2f} (wanted: at most {MAX_DRIFT:g})")
    figures = {**result, "memory_mb": [first, last], "memory_growth": growth, "p99_drift": drift}
    return figures, bool(result["errors"]) or growth >= MAX_GROWTH or drift > MAX_DRIFT
