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
from contextlib import ExitStack
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
        interrupted = False
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sorl-serve-"))
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
            # otherwise the embedding model and FAISS of each worker would use every core
            cores = max(1, (os.cpu_count() or 1) // self._settings.workers)
            os.environ.setdefault("OMP_NUM_THREADS", str(cores))
            stack.callback(os.environ.pop, "PROMETHEUS_MULTIPROC_DIR", None)
            before = signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
            stack.callback(signal.signal, signal.SIGTERM, before)
            try:
                status = self._supervise()
            except KeyboardInterrupt:
                interrupted, status = True, 0
            finally:
                self._end()
        if interrupted:
            raise KeyboardInterrupt
        return status

    def _supervise(self) -> int:
        receiver, sender = self._context.Pipe(duplex=False)
        self._start(0, warm_first=False, ready=sender)
        sender.close()
        ready = False
        while not self._stopping.is_set():
            watched: list[Any] = [process.sentinel for process in self._processes.values()]
            for event in wait(watched if ready else [*watched, receiver], timeout=0.2):
                if event is receiver and not ready:
                    try:
                        self._on_ready(receiver.recv())
                    except EOFError:
                        continue  # the worker has died, which its sentinel reports
                    ready = True
                    for number in range(1, self._settings.workers):
                        self._start(number, warm_first=True)
            status = self._replace_dead(ready)
            if status is not None:
                return status
        return 0

    def _start(self, number: int, *, warm_first: bool, ready: Any = None) -> None:
        process = self._context.Process(
            target=_work,
            args=(self._settings, self._port, warm_first, ready),
            name=f"sorl-serve-{number}",
        )
        process.start()
        self._processes[number] = process

    def _replace_dead(self, ready: bool) -> int | None:
        """Replace dead workers; returns an exit status if that is pointless."""
        for number, process in list(self._processes.items()):
            if process.is_alive() or self._stopping.is_set():
                continue
            process.join()
            if process.exitcode == USAGE or not ready:
                return USAGE if process.exitcode == USAGE else 1
            from prometheus_client.multiprocess import mark_process_dead

            mark_process_dead(process.pid)
            logger.error("worker %d ended with status %s and is started again", number, process.exitcode)
            now = time.monotonic()
            self._restarts = [*(then for then in self._restarts if now - then < 60), now]
            if len(self._restarts) > MAX_RESTARTS:
                logger.error("%d workers died within a minute: giving up", len(self._restarts))
                return 1
            self._start(number, warm_first=True)
        return None

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


def _work(settings: SearchSettings, port: int, warm_first: bool, ready: Any) -> None:
    """The life of one worker process."""
    set_up_logging("sorl-serve")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(
            settings,
            lambda: bind(settings.server.host, port, shared=True),
            on_ready=(lambda facts: None) if ready is None else ready.send,
            warm_first=warm_first,
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
