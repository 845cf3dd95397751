"""The benchmarks of search. The figures that they gave are in docs/search/ and docs/search.md.

rate      queries per second of sorl-serve, next to BM25 in process
soak      minutes of mixed load on sorl-serve: errors, growth of memory, latency that drifts
recall    does the passage with the answer come back among the first three?
scale     build, open and search indexes of up to millions of passages

    python benchmarks/search rate --json rate.json
    python benchmarks/search scale --help
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from sorl_env.errors import UserError

# benchmark -> the module that measures it
BENCHMARKS = {"rate": "serving", "soak": "serving", "recall": "recall", "scale": "scale"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    named = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in BENCHMARKS else ""
    for name, module in BENCHMARKS.items():
        command = commands.add_parser(name)
        command.add_argument("--json", type=Path, help="write the figures to this file")
        if name == named:  # the others need not be imported, which takes a while
            measure = getattr(importlib.import_module(module), f"add_{name}")(command)
    args = parser.parse_args()
    try:
        figures, status = measure(args)
    except UserError as error:
        print(f"{parser.prog} {named}: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
