"""The service: its application (``/retrieve``, ``/mcp``, ``/health``, ``/ready``, ``/metrics``), and its processes.

Several workers on one port are processes that share the memory-mapped index and are replaced when they die.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sorl_env.commands.command import FAILED, WRONG_USAGE, say
from sorl_env.errors import UserError
from sorl_tools.corpus import SUFFIXES
from sorl_tools.http_server.app import Guard, RequestError, make_app
from sorl_tools.http_server.options import ServerSettings, bind, set_up_logging
from sorl_tools.http_server.server import Server
from sorl_tools.index import Index, open_index
from sorl_tools.index.build.build import open_bm25
from sorl_tools.serve.batcher import NUM_QUERIES, Batcher, Metrics
from sorl_tools.serve.protocol import RequestLimits, encode_result, parse_request

logger = logging.getLogger(__name__)

FINGERPRINT_HEADER = "x-sorl-fingerprint"


def search_app(
    batcher: Batcher,
    facts: Mapping[str, Any],
    metrics: Metrics,
    limits: RequestLimits,
    settings: ServerSettings,
    *,
    mcp: bool = False,
) -> ASGIApp:
    """One worker's application. ``facts`` is what ``/health`` says; ``mcp`` serves ``/mcp``, too (package ``mcp``)."""

    async def retrieve(request: Request) -> Response:
        asked = parse_request(await request.body(), limits)
        found = await batcher.search(asked.queries, asked.top_k)
        request.scope[NUM_QUERIES] = len(asked.queries)
        headers = {FINGERPRINT_HEADER: str(facts["fingerprint"])}
        return Response(encode_result(found, asked), headers=headers, media_type=asked.content_type)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "ready": True, "pid": os.getpid(), **facts})

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": True})

    async def expose(request: Request) -> Response:
        return Response(metrics.expose(), media_type=metrics.content_type)

    async def no_mcp(request: Request) -> Response:
        raise RequestError(404, "this server has no /mcp: start it with --mcp")

    answer_mcp: Any = no_mcp
    if mcp:
        from sorl_tools.serve.mcp_route import McpRoute

        answer_mcp = McpRoute(batcher, limits, settings.max_body_bytes)
    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/mcp", answer_mcp, methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", expose),
    ]
    app = make_app(routes, lifespan=answer_mcp.lifespan if mcp else None)
    return _Counted(Guard(app, settings, open_paths=("/health", "/ready")), metrics)


class _Counted:
    """Counts the answers to searches, those of the guard included."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ("/retrieve", "/mcp"):
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, send_noting)
        if status:  # else the client had left
            self._metrics.answered(status, scope.get(NUM_QUERIES, 0), time.monotonic() - started)


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
    """Open an index folder, or a corpus file, whose BM25 index is built once and kept in the cache folder. Returns the
    index, and what ``/health`` says about it. Raises UserError if it is neither, cannot be read, or a model or a device
    is given although nothing is embedded."""
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
    """Serve until SIGTERM or SIGINT, then answer the requests in progress and return. Must run on the main thread. When
    the index is open and warm, ``open_socket`` makes the bound socket, and ``on_ready`` gets the facts about the index.
    A source that cannot be opened is a UserError; a SIGINT is a KeyboardInterrupt when all is closed."""
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


RESTART_S = 1.0  # before a dead worker is started again, so that a fault that stays does not fill the log

OnReady = Callable[[dict[str, Any]], None]


def serve_with_workers(
    args: argparse.Namespace, settings: ServerSettings, port: int, on_ready: OnReady
) -> int:
    """Serve until a signal; returns the exit status. Each worker listens on its own socket with SO_REUSEPORT, so that
    the kernel distributes the connections evenly. With a single shared socket, the first worker to wake up would take
    all connections and keep them. The first worker opens the index alone, which may build and compile what is not in
    the cache folder, and calls ``on_ready`` once. The caller keeps a socket bound to ``port``. After a SIGINT,
    KeyboardInterrupt is raised when all have ended."""
    from prometheus_client.multiprocess import mark_process_dead

    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    workers: list[BaseProcess] = []
    stopping: list[int] = []

    def start() -> BaseProcess:
        worker = context.Process(target=_work, args=(args, settings, port, ready, on_ready))
        worker.start()
        return worker

    before = signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    with tempfile.TemporaryDirectory(prefix="sorl-serve-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        # otherwise the embedding model and FAISS of each worker would use every core
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.workers)))
        try:
            workers.append(start())
            while not stopping:
                wait([worker.sentinel for worker in workers], timeout=0.2)
                for number, worker in enumerate(workers):
                    if worker.is_alive() or stopping:
                        continue
                    if worker.exitcode == WRONG_USAGE or not ready.is_set():
                        return WRONG_USAGE if worker.exitcode == WRONG_USAGE else FAILED
                    logger.error(
                        "worker %d ended with status %s and is started again", number, worker.exitcode
                    )
                    mark_process_dead(worker.pid)
                    time.sleep(RESTART_S)
                    workers[number] = start()
                if ready.is_set() and len(workers) < args.workers:
                    workers.append(start())
            return 0
        finally:
            _end(workers, settings.drain_s + CLOSE_S)
            signal.signal(signal.SIGTERM, before)


def _end(workers: list[BaseProcess], timeout_s: float) -> None:
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
        worker.join()


def _work(
    args: argparse.Namespace, settings: ServerSettings, port: int, ready: Event, on_ready: OnReady
) -> None:

    def opened(facts: dict[str, Any]) -> None:
        if not ready.is_set():
            on_ready(facts)
            ready.set()

    set_up_logging("sorl-serve")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(args, settings, lambda: bind(settings.host, port, shared=True), opened)
    except UserError as error:
        say("sorl-serve", str(error))
        sys.exit(WRONG_USAGE)
    except KeyboardInterrupt:
        pass  # Ctrl-C reaches every process of the group, and the supervisor reports it


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
