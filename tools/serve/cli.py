"""``sorl-serve INDEX_OR_CORPUS``: serve a built index, or a corpus, over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sorl_env.commands.command import Parser, number, run_command, whole
from sorl_env.errors import UserError
from sorl_tools.http_server.options import (
    add_server_options,
    announce,
    bind,
    check_installed,
    server_settings,
    set_up_logging,
)

PORT = 8301
_positive = whole(1, 2**31 - 1)
# Each limit: its name, its type, its default, and its help text.
_LIMITS: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
    ("top_k", _positive, 3, "passages per query, if a request names no number"),
    ("max_top_k", _positive, 100, "most passages per query"),
    ("max_queries", _positive, 512, "most queries per request"),
    ("max_query_chars", _positive, 4096, "most characters of a query"),
    ("max_batch", _positive, 512, "most queries searched together"),
    ("max_waiting", _positive, 16384, "most queries in a worker's queue; further ones get 503"),
    ("timeout_s", number(above=0, high=86400), 30.0, "longest wait of a request in the queue, in seconds"),
)
_NEEDED = ("httptools", "msgspec", "numba", "prometheus_client", "starlette", "uvicorn")


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="sorl-serve",
        description="Serve an index or a corpus over HTTP, with Search-R1's /retrieve protocol.",
    )
    add = parser.add_argument
    source = "a folder built by sorl-index, or a .jsonl or .jsonl.gz corpus"
    add("source", metavar="INDEX_OR_CORPUS", type=Path, help=source)
    workers = "number of processes; they share the port and the memory of the index (default: 1)"
    add("--workers", type=_positive, default=1, help=workers)
    add("--model", help="folder, name or address of the embedding model, if it has moved")
    add("--device", help="torch device of the embedding model (default: a GPU if there is one)")
    add("--mcp", action="store_true", help="serve the search as an MCP tool at /mcp, too (extra: mcp)")
    for name, kind, default, text in _LIMITS:
        add(f"--{name}", type=kind, default=default, help=f"{text} (default: {default:g})")
    add_server_options(parser, PORT, max_body_kb=4096)
    args: argparse.Namespace = parser.parse_args(argv)
    if args.top_k > args.max_top_k:
        raise UserError(f"--top_k {args.top_k} is above --max_top_k {args.max_top_k}: lower it")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    set_up_logging("sorl-serve")
    return run_command("sorl-serve", _serve, argv)


def _serve(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    check_installed(_NEEDED, "search")
    if args.mcp:
        check_installed(["mcp"], "mcp")
    from sorl_tools.serve.server import check_source, serve, serve_with_workers

    args.source = args.source.expanduser()
    check_source(args.source)
    settings = server_settings(args)
    # refused if anyone listens on the port, including another sorl-serve
    with bind(settings.host, settings.port) as bound:
        port = bound.getsockname()[1]
        lines = [f"{{url}}/retrieve: opening {args.source}"]
        if args.mcp:
            lines.append("{url}/mcp is an MCP server (streamable HTTP)")
        announce("sorl-serve", settings, port, *lines)
        if args.workers == 1:
            serve(args, settings, lambda: bound, _say_ready)
            return 0
    with bind(settings.host, port, shared=True):  # keeps the port while workers are replaced
        return serve_with_workers(args, settings, port, _say_ready)


def _say_ready(facts: dict[str, Any]) -> None:
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    print(f"sorl-serve: ready: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
