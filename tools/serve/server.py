"""One worker: a uvicorn server around the application, which runs until a signal or until opening the index fails."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sorl_env.errors import UserError
from sorl_tools.serve.app import App
from sorl_tools.serve.backend import open_backend
from sorl_tools.serve.batcher import Batcher
from sorl_tools.serve.connections import ConnectionLimits, limited_config
from sorl_tools.serve.mcp_route import McpRoute
from sorl_tools.serve.metrics import Metrics
from sorl_tools.serve.protocol import RequestLimits

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 2048


@dataclass(frozen=True)
class ServeSettings:
    """What a server serves, where and how.

    Attributes:
        source: an index folder or a corpus file.
        port: 0 takes a free one.
        model, device: folder or name of an embedding model that has moved since the build, and its torch device.
        mcp: whether ``/mcp`` is served; needs the ``mcp`` package.
        max_batch, max_waiting: most queries in one search, and in the queue.
        timeout_s: a request that has waited longer for its search gets 503.
        connection: limits on a client that has not sent a whole request.
        drain_s: seconds for requests in progress when the server is told to stop.
    """

    source: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token: str | None = field(default=None, repr=False)
    model: str | None = None
    device: str | None = None
    limits: RequestLimits = RequestLimits()
    mcp: bool = False
    max_batch: int = 512
    max_waiting: int = 16384
    max_connections: int = 4096
    timeout_s: float = 30.0
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    drain_s: float = 30.0


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet.

    Args:
        shared: other sockets of this user may be bound to the same port (SO_REUSEPORT); the kernel distributes the
            connections among those that listen.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"host={host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        what = f"cannot listen on {host}:{port} ({error.strerror})"
        raise UserError(f"{what}: stop what uses the port, or give another --port") from error
    return bound


def serve(
    settings: ServeSettings,
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
    import uvicorn

    opened = threading.Event()

    def backend_opened() -> None:
        if batcher.failure is not None:
            server.should_exit = True
        elif batcher.backend is not None:
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
    limits, connection = settings.limits, settings.connection
    mcp = McpRoute(batcher, limits) if settings.mcp else None
    wait_s = connection.body_timeout_s
    app = App(batcher, metrics, limits, token=settings.token, mcp=mcp, body_timeout_s=wait_s)
    config = limited_config(
        app,
        connection,
        metrics.refused,
        drain_s=settings.drain_s,
        backlog=BACKLOG,
        max_connections=settings.max_connections,
    )
    server = uvicorn.Server(config)
    with _sigterm_is_no_error(server):
        batcher.start()
        while warm_first and not opened.wait(0.1) and not server.should_exit:
            pass
        if not server.should_exit:
            server.run(sockets=[open_socket()])
        batcher.close()
    if batcher.failure is not None:
        raise batcher.failure


@contextmanager
def _sigterm_is_no_error(server: uvicorn.Server) -> Iterator[None]:
    """Keep SIGTERM harmless: after stopping, uvicorn raises it again for the handler that was there before."""

    def end(*_: Any) -> None:
        server.should_exit = True

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
