"""Several workers on one port: processes that share the memory-mapped index and are replaced when they die."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

from sorl_env.command import FAILED, WRONG_USAGE, say
from sorl_env.errors import UserError
from sorl_tools.http_server.options import ServerSettings, bind, set_up_logging
from sorl_tools.serve.server import CLOSE_S, serve

logger = logging.getLogger(__name__)

RESTART_S = 1.0  # before a dead worker is started again, so that a fault that stays does not fill the log

OnReady = Callable[[dict[str, Any]], None]


def serve_with_workers(
    args: argparse.Namespace, settings: ServerSettings, port: int, on_ready: OnReady
) -> int:
    """Serve until a signal; returns the exit status.

    Each worker listens on its own socket with SO_REUSEPORT, so that the kernel distributes the connections evenly.
    With a single shared socket, the first worker to wake up would take all connections and keep them. The first worker
    opens the index alone, which may build and compile what is not in the cache folder.

    Args:
        args: the options of ``sorl-serve``.
        port: the port to serve on; the caller keeps a socket bound to it.
        on_ready: called once in the first worker, with the facts about the index.

    Raises:
        KeyboardInterrupt: after a SIGINT, when all workers have ended.
    """
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
    """Ask all workers to stop, wait while they answer the requests in progress, then kill those that are left."""
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
    """The life of one worker process."""

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
    """Stop this worker when its supervisor is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
