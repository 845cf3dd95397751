"""Minutes of mixed load on sorl-serve at the highest rate it holds: errors, growth of memory, latency that drifts.

64 clients send requests of 1 to 32 queries without a pause. Memory is sampled every second, from the end of the first
tenth of the time on.

    python benchmarks/search_soak.py --seconds 300 --json search_soak.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
from pathlib import Path

from search_servers import CORPUS, QUESTIONS, load, memory_mb, sorl_serve

SIZES = (1, 8, 1, 32, 1, 3, 1, 16)
MAX_GROWTH, MAX_DRIFT = 0.05, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help=".jsonl.gz with a question a row")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
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
    errors = result["requests"] - result["statuses"].get("200", 0) + result["broken"]
    print(f"{result['requests']:,} requests, {result['requests_per_s']:,.0f} a second, {errors} errors")
    print(
        f"{result['queries_per_s']:,.0f} queries a second, p50 {result['p50_ms']:.1f} ms, p99 {result['p99_ms']:.1f} ms"
    )
    print(f"memory {first:.0f} MB to {last:.0f} MB: {growth:+.1%} (wanted: below {MAX_GROWTH:.0%})")
    print(f"p99 of the second half to the first: {drift:.2f} (wanted: at most {MAX_DRIFT:g})")
    if args.json:
        figures = {
            **result,
            "errors": errors,
            "memory_mb": [first, last],
            "memory_growth": growth,
            "p99_drift": drift,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if errors == 0 and growth < MAX_GROWTH and drift <= MAX_DRIFT else 1


if __name__ == "__main__":
    sys.exit(main())
