"""One worker: opens the index, then serves it until a signal."""

from __future__ import annotations

import argparse
import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_tools.corpus import SUFFIXES
from sorl_tools.http_server.options import ServerSettings
from sorl_tools.http_server.server import Server
from sorl_tools.index import Index, open_index
from sorl_tools.index.cached import open_bm25
from sorl_tools.serve.app import search_app
from sorl_tools.serve.batcher import Batcher
from sorl_tools.serve.metrics import Metrics
from sorl_tools.serve.protocol import RequestLimits

CLOSE_S = 5.0  # for a search in progress when all requests are answered, or given up


def check_source(path: Path) -> None:
    """Raise UserError unless ``path`` looks like an index or a corpus; opens nothing."""
    if not path.exists():
        raise UserError(f"{path}: no such index or corpus; make one: sorl-index build CORPUS --out DIR")
    if path.is_file() and not path.name.endswith(SUFFIXES):
        raise UserError(f"{path}: cannot serve this file; give an index folder or a {' or '.join(SUFFIXES)}")


def open_source(
    path: Path, *, model: str | None = None, device: str | None = None
) -> tuple[Index, dict[str, Any]]:
    """Open an index folder, or a corpus file, whose BM25 index is built once and kept in the cache folder.

    Args:
        model, device: for an index of vectors, see ``open_index``.

    Returns:
        The index, and what ``/health`` says about it.

    Raises:
        UserError: it is neither, it cannot be read, or a model is given although nothing is embedded.
    """
    check_source(path)
    if path.is_file():
        index, fingerprint = open_bm25(path)
    else:
        index = open_index(path, model=model, device=device)
        fingerprint = index.manifest.hash
    backend = index.manifest.backend
    for name, value in (("model", model), ("device", device)):
        if backend == "bm25" and value is not None:
            raise UserError(f"{name}={value}: BM25 of {path} embeds nothing; leave it out")
    return index, {"backend": backend, "fingerprint": fingerprint, "passages": index.manifest.passages}


def serve(
    args: argparse.Namespace,
    settings: ServerSettings,
    open_socket: Callable[[], socket.socket],
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then answer the requests in progress and return. Must run on the main thread.

    Args:
        args: the options of ``sorl-serve``.
        open_socket: makes the bound socket to listen on, when the index is open and warm.
        on_ready: called then with the facts about the index.

    Raises:
        UserError: the source cannot be opened.
        KeyboardInterrupt: after a SIGINT, when everything is closed.
    """
    index, facts = open_source(args.source, model=args.model, device=args.device)
    index.search(["warm-up"], 1)
    gc.collect()
    gc.freeze()  # else each full collection goes through the whole index, and all requests wait for it
    metrics = Metrics()
    batcher = Batcher(
        index.search,
        metrics,
        max_batch=args.max_batch,
        max_waiting=args.max_waiting,
        timeout_s=args.timeout_s,
    )
    limits = RequestLimits(args.max_queries, args.max_query_chars, args.max_top_k, args.top_k)
    app = search_app(batcher, facts, metrics, limits, settings, mcp=args.mcp)
    bound = open_socket()
    bound.listen()
    on_ready(facts)
    try:
        Server(app, settings).serve_on(bound)
    finally:
        # a search that hangs in its encoder must not keep the process
        end = threading.Timer(CLOSE_S, os._exit, [0])
        end.daemon = True
        end.start()
        batcher.close()
        end.cancel()
        index.close()
