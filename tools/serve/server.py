"""One worker: a server around the application, which runs until a signal or until opening the index fails."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_tools.http_server.options import ServerSettings
from sorl_tools.http_server.server import Server
from sorl_tools.serve.app import search_app
from sorl_tools.serve.backend import open_backend
from sorl_tools.serve.batcher import Batcher
from sorl_tools.serve.metrics import Metrics
from sorl_tools.serve.protocol import RequestLimits

CLOSE_S = 5.0  # for a search in progress when all requests are answered, or given up


@dataclass(frozen=True)
class SearchSettings:
    """What a server serves, and how.

    Attributes:
        source: an index folder or a corpus file.
        model, device: folder or name of an embedding model that has moved since the build, and its torch device.
        mcp: whether ``/mcp`` is served; needs the ``mcp`` package.
        max_batch, max_waiting: most queries in one search, and in the queue.
        timeout_s: a request that has waited longer for its search gets 503.
    """

    source: Path
    server: ServerSettings = ServerSettings()
    workers: int = 1
    model: str | None = None
    device: str | None = None
    limits: RequestLimits = RequestLimits()
    mcp: bool = False
    max_batch: int = 512
    max_waiting: int = 16384
    timeout_s: float = 30.0


def serve(
    settings: SearchSettings,
    open_socket: Callable[[], socket.socket],
    on_ready: Callable[[dict[str, Any]], None],
    *,
    warm_first: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then answer the requests in progress and return. Must run on the main thread.

    Args:
        open_socket: makes the bound socket to listen on.
        on_ready: called on another thread with the facts about the backend, once it is open and warm.
        warm_first: listen only when the backend is warm; otherwise listen at once, and ``/ready`` says when it is.

    Raises:
        UserError: the source cannot be opened.
        KeyboardInterrupt: after a SIGINT, when everything is closed.
    """
    opened = threading.Event()

    def backend_opened() -> None:
        if batcher.failure is not None:
            server.stop()
        elif batcher.backend is not None:
            gc.collect()
            gc.freeze()  # else each full collection goes through the whole index, and all requests wait for it
            on_ready(batcher.backend.facts)
        opened.set()

    metrics = Metrics()
    batcher = Batcher(
        lambda: open_backend(settings.source, model=settings.model, device=settings.device),
        metrics,
        max_batch=settings.max_batch,
        max_waiting=settings.max_waiting,
        timeout_s=settings.timeout_s,
        on_ready=backend_opened,
    )
    app = search_app(batcher, metrics, settings.limits, settings.server, mcp=settings.mcp)
    server = Server(app, settings.server, on_refused=metrics.refused)
    batcher.start()
    if warm_first:
        opened.wait()
    if batcher.failure is None:
        server.serve_on(open_socket())
    # a search that hangs in its encoder must not keep the process
    end = threading.Timer(CLOSE_S, os._exit, [0])
    end.daemon = True
    end.start()
    batcher.close()
    end.cancel()
    if batcher.failure is not None:
        raise batcher.failure
