"""What each kind of index costs behind sorl-serve: latency of one client, queries a second of many, memory, disk.

One worker; the clients ask one query a request. ``search_recall.py --work DIR`` leaves indexes to compare in DIR.

    python benchmarks/search_backends.py DIR/wiki-bm25 DIR/wiki-dense DIR/wiki-hybrid DIR/wiki-sq4 --json backends.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from search_servers import QUESTIONS, load, memory_mb, sorl_serve

from sorl_env.errors import UserError
from sorl_tools.index.manifest import read_manifest

CLIENTS = 64


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One index; prints a line."""
    manifest = read_manifest(folder)
    with sorl_serve(folder, 1) as (pid, port):
        opened = memory_mb(pid)
        alone = load(port, arguments.questions, arguments.seconds, 1, [1])
        many = load(port, arguments.questions, arguments.seconds, CLIENTS, [1])
        loaded = memory_mb(pid)
    row = {
        "index": folder.name,
        "backend": manifest.backend,
        "passages": manifest.passages,
        "disk_mb": manifest.bytes / 2**20,
        "memory_mb": loaded,
        "memory_opened_mb": opened,
        "alone_p50_ms": alone["p50_ms"],
        "alone_p99_ms": alone["p99_ms"],
        "queries_per_s": many["queries_per_s"],
        "p50_ms": many["p50_ms"],
        "p99_ms": many["p99_ms"],
    }
    for result in (alone, many):
        if result["broken"] or set(result["statuses"]) != {"200"}:
            raise SystemExit(
                f"search_backends: {folder}: {result['statuses']}, {result['broken']} broken off"
            )
    print(
        f"{folder.name:<16}{row['disk_mb']:>8.0f} MB on disk {loaded:>8.0f} MB in memory   alone: p50 "
        f"{row['alone_p50_ms']:.1f} ms, p99 {row['alone_p99_ms']:.1f} ms   {CLIENTS} clients: "
        f"{row['queries_per_s']:,.0f} queries/s, p50 {row['p50_ms']:.0f} ms, p99 {row['p99_ms']:.0f} ms",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("indexes", type=Path, nargs="+", help="folders that sorl-index built")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help=".jsonl.gz with a question a row")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    arguments = parser.parse_args()
    try:
        rows = [measure(folder, arguments) for folder in arguments.indexes]
    except UserError as error:
        print(f"search_backends: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        report = {"rows": rows, "cores": os.cpu_count()}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
