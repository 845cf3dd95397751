"""Several workers on one port: processes that share the memory-mapped index and are replaced when they die."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from sorl_env.errors import UserError
from sorl_tools.http_server.options import bind, set_up_logging
from sorl_tools.serve.server import SearchSettings, serve

logger = logging.getLogger(__name__)

USAGE = 2  # exit status of a worker whose source cannot be opened
MAX_RESTARTS = 5  # within a minute; after that restarting does not help


class Workers:
    """A supervisor and its worker processes.

    Each worker listens on its own socket with SO_REUSEPORT, so that the kernel distributes the connections evenly.
    With a single shared socket, the first worker to wake up would take all connections and keep them. The first worker
    listens at once and opens the index, which may build and compile what is not in the cache folder. The others, and
    those that replace a dead one, listen when they are warm.

    Args:
        port: the port to serve on; the caller keeps a socket bound to it.
        on_ready: called once, with the facts about the index.
    """

    def __init__(
        self, settings: SearchSettings, port: int, on_ready: Callable[[dict[str, Any]], None]
    ) -> None:
        self._settings = settings
        self._port = port
        self._on_ready = on_ready
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[int, Any] = {}
        self._restarts: list[float] = []
        self._stopping = threading.Event()

    def run(self) -> int:
        """Serve until a signal; returns the exit status.

        Raises:
            KeyboardInterrupt: after a SIGINT, when all workers have ended.
        """
        before = signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        with tempfile.TemporaryDirectory(prefix="sorl-serve-") as folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
            # otherwise the embedding model and FAISS of each worker would use every core
            cores = max(1, (os.cpu_count() or 1) // self._settings.workers)
            os.environ.setdefault("OMP_NUM_THREADS", str(cores))
            try:
                return self._supervise()
            finally:
                self._end()
                signal.signal(signal.SIGTERM, before)

    def _supervise(self) -> int:
        receiver, sender = self._context.Pipe(duplex=False)
        self._start(0, sender)
        sender.close()
        ready = False
        while not self._stopping.is_set():
            if not ready and receiver.poll(0.2) and self._processes[0].is_alive():
                with suppress(EOFError):  # it has died, which is seen below
                    self._on_ready(receiver.recv())
                    ready = True
                    for number in range(1, self._settings.workers):
                        self._start(number)
            elif ready:
                wait([process.sentinel for process in self._processes.values()], timeout=0.2)
            for number, process in list(self._processes.items()):
                if not process.is_alive() and not self._stopping.is_set():
                    if not ready or process.exitcode == USAGE:
                        return USAGE if process.exitcode == USAGE else 1
                    if not self._replace(number):
                        return 1
        return 0

    def _start(self, number: int, ready: Any = None) -> None:
        """Start a worker; ``ready`` is where the first one sends the facts about the index."""
        arguments = (self._settings, self._port, ready)
        process = self._context.Process(target=_work, args=arguments, name=f"sorl-serve-{number}")
        process.start()
        self._processes[number] = process

    def _replace(self, number: int) -> bool:
        """Start a dead worker again; False if that is pointless."""
        from prometheus_client.multiprocess import mark_process_dead

        process, now = self._processes[number], time.monotonic()
        mark_process_dead(process.pid)
        logger.error("worker %d ended with status %s and is started again", number, process.exitcode)
        self._restarts = [*(then for then in self._restarts if now - then < 60), now]
        if len(self._restarts) > MAX_RESTARTS:
            logger.error("%d workers died within a minute: giving up", len(self._restarts))
            return False
        self._start(number)
        return True

    def _end(self) -> None:
        """Ask all workers to stop, wait while they answer the requests in progress, then kill those that are left."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + self._settings.server.drain_s + 5.0
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _work(settings: SearchSettings, port: int, ready: Any) -> None:
    """The life of one worker process."""
    set_up_logging("sorl-serve")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(
            settings,
            lambda: bind(settings.server.host, port, shared=True),
            on_ready=(lambda facts: None) if ready is None else ready.send,
            warm_first=ready is None,
        )
    except UserError as error:
        print(f"sorl-serve: {error}", file=sys.stderr)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        pass  # Ctrl-C reaches every process of the group, and the supervisor reports it


def _end_with_parent() -> None:
    """Stop this worker when its supervisor is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
