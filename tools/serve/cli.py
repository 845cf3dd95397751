"""``sorl-serve INDEX_OR_CORPUS``: serve a built index, or a corpus, over HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sorl_env.command import Parser, number, run_command, whole
from sorl_env.errors import UserError
from sorl_tools.serve.logs import set_up_logging

if TYPE_CHECKING:
    from sorl_tools.serve.connections import ConnectionLimits

_positive = whole(1, 2**31 - 1)
_seconds = number(above=0, high=86400)
# Each limit: its name, its type, its default, and its help text.
_LIMITS: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
    ("top-k", _positive, 3, "passages per query, if a request names no number"),
    ("max-top-k", _positive, 100, "most passages per query"),
    ("max-queries", _positive, 512, "most queries per request"),
    ("max-query-chars", _positive, 4096, "most characters of a query"),
    ("max-body-mb", whole(1, 65536), 4, "largest body of a request, in MB"),
    ("max-batch", _positive, 512, "most queries searched together"),
    ("max-waiting", _positive, 16384, "most queries in a worker's queue; further ones get 503"),
    ("max-connections", _positive, 4096, "most connections of a worker"),
    ("timeout-s", _seconds, 30.0, "longest wait of a request in the queue, in seconds"),
    ("drain-s", _seconds, 30.0, "seconds to answer the requests in progress when the server stops"),
)
_CONNECTION_LIMITS: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
    ("max-head-kb", _positive, 16, "largest request line with headers, in kB; larger ones get 431"),
    ("head-timeout-s", _seconds, 10.0, "seconds for the request line and headers to arrive; then 408"),
    ("body-timeout-s", _seconds, 10.0, "seconds for the body of a request to arrive; then 408"),
    ("reply-timeout-s", _seconds, 30.0, "seconds until a client that does not read its reply is cut off"),
    ("idle-timeout-s", _positive, 20, "whole seconds until a connection without a request is closed"),
)
_NEEDED = ("msgspec", "numba", "prometheus_client", "uvicorn")


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="sorl-serve",
        description="Serve an index or a corpus over HTTP, with Search-R1's /retrieve protocol.",
    )
    parser.add_argument(
        "source",
        metavar="INDEX_OR_CORPUS",
        type=Path,
        help="a folder built by sorl-index, or a .jsonl or .jsonl.gz corpus",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=8000, help="port; 0 takes a free one (default: 8000)")
    add(
        "--workers",
        type=_positive,
        default=1,
        help="number of processes; they share the port and the memory of the index (default: 1)",
    )
    add("--model", help="folder or name of the embedding model, if it has moved since the build")
    add("--device", help="torch device of the embedding model (default: a GPU if there is one)")
    add("--mcp", action="store_true", help="serve the search as an MCP tool at /mcp, too (extra: mcp)")
    add("--token-file", "--token_file", type=Path, help="file with a token that requests must carry")
    for name, kind, default, text in _LIMITS:
        _add_limit(parser, name, kind, default, text)
    add_connection_options(parser)
    args: argparse.Namespace = parser.parse_args(argv)
    if args.top_k > args.max_top_k:
        raise UserError(f"--top_k {args.top_k} is above --max_top_k {args.max_top_k}: lower it")
    return args


def add_connection_options(parser: argparse._ActionsContainer) -> None:
    """Add the limits on a client that has not sent a whole request; `connection_limits` reads them."""
    for name, kind, default, text in _CONNECTION_LIMITS:
        _add_limit(parser, name, kind, default, text)


def _add_limit(
    parser: argparse._ActionsContainer, name: str, kind: Callable[[str], float], default: float, text: str
) -> None:
    """Add an option that may be spelled with hyphens or underscores; its help ends with the default."""
    help_ = f"{text} (default: {default:g})"
    parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=kind, default=default, help=help_)


def connection_limits(args: argparse.Namespace) -> ConnectionLimits:
    """The limits that `add_connection_options` has added to the parser."""
    from sorl_tools.serve.connections import ConnectionLimits

    return ConnectionLimits(
        max_head_bytes=args.max_head_kb << 10,
        head_timeout_s=args.head_timeout_s,
        body_timeout_s=args.body_timeout_s,
        reply_timeout_s=args.reply_timeout_s,
        idle_timeout_s=args.idle_timeout_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    set_up_logging()
    return run_command("sorl-serve", _serve, argv)


def _serve(argv: Sequence[str]) -> int:
    args = _parse_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"these packages are not installed: {', '.join(missing)}; pip install 'sorl[search]'")
    if args.mcp and importlib.util.find_spec("mcp") is None:
        raise UserError("--mcp: the package mcp is not installed; pip install 'sorl[mcp]'")
    from sorl_tools.serve.backend import check_source
    from sorl_tools.serve.protocol import RequestLimits
    from sorl_tools.serve.server import ServeSettings, bind, serve
    from sorl_tools.serve.workers import Workers

    source = args.source.expanduser()
    check_source(source)
    settings = ServeSettings(
        source=source,
        host=args.host,
        port=args.port,
        workers=args.workers,
        token=None if args.token_file is None else read_token(args.token_file),
        model=args.model,
        device=args.device,
        limits=RequestLimits(
            max_body_bytes=args.max_body_mb << 20,
            max_queries=args.max_queries,
            max_query_chars=args.max_query_chars,
            max_top_k=args.max_top_k,
            default_top_k=args.top_k,
        ),
        mcp=args.mcp,
        max_batch=args.max_batch,
        max_waiting=args.max_waiting,
        max_connections=args.max_connections,
        timeout_s=args.timeout_s,
        connection=connection_limits(args),
        drain_s=args.drain_s,
    )
    if settings.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise UserError(f"workers={settings.workers}: this system cannot share a port; use --workers 1")
    # refused if anyone listens on the port, including another sorl-serve
    bound = bind(settings.host, settings.port)
    port = bound.getsockname()[1]
    _announce(settings.host, port, settings.token, f"opening {source}")
    if settings.mcp:
        print("sorl-serve: the same address with /mcp is an MCP server (streamable HTTP)", flush=True)

    def on_ready(facts: dict[str, Any]) -> None:
        said = ", ".join(f"{name} {value}" for name, value in facts.items())
        print(f"sorl-serve: ready: {said}", flush=True)

    if settings.workers == 1:
        serve(settings, lambda: bound, on_ready)
        return 0
    bound.close()
    with bind(settings.host, port, shared=True):  # keeps the port while workers are replaced
        return Workers(settings, port, on_ready).run()


def _announce(host: str, port: int, token: str | None, doing: str) -> None:
    where = f"[{host}]" if ":" in host else host
    print(f"sorl-serve: http://{where}:{port}/retrieve: {doing} (/ready says when it is done)", flush=True)
    if token is None and not _is_loopback(host):
        print(
            f"sorl-serve: warning: anyone who can reach {host} may search, because there is no --token_file",
            file=sys.stderr,
            flush=True,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        UserError: the file cannot be read, or does not hold a single printable word.
    """
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token_file={path}: {error}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"token_file={path}: it must hold one word of printable ASCII characters")
    return token


if __name__ == "__main__":
    sys.exit(main())
