"""When a worker dies, end the others, which would wait for it in a broadcast."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

POLL_S = 2.0


@contextmanager
def watched(workers: Sequence[Any], poll_s: float = POLL_S) -> Iterator[None]:
    """Within a block that calls Ray actors, the death of one of ``workers`` ends the block, whatever it waits for.

    Ray reports a death only to callers of the dead actor. A training worker in a collective with it, or in a weight
    broadcast to a dead vLLM engine, waits on (the timeouts of gloo and NCCL are half an hour), and so does the trainer,
    which waits for that training worker.

    Raises:
        ray.exceptions.ActorDiedError: of the worker that died first, instead of the error that its death caused.
    """
    deaths: list[ActorDiedError] = []
    over = threading.Event()

    def watch() -> None:
        # a busy actor answers when it is free; a call to a dead one fails at once
        calls: dict[ray.ObjectRef[Any], Any] = {}
        while not over.wait(poll_s):
            asked = set(calls.values())
            calls |= {worker.__ray_ready__.remote(): worker for worker in workers if worker not in asked}
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=poll_s)
            for call in done:
                del calls[call]
                try:
                    ray.get(call)
                except ActorDiedError as error:
                    deaths.append(error)
                    for worker in workers:
                        ray.kill(worker)
                    return

    watcher = threading.Thread(target=watch, name="watched", daemon=True)
    watcher.start()
    try:
        yield
    except RayError as error:
        # the block may have called the dead worker and know of its death before the watcher does
        watcher.join(2 * poll_s)
        if deaths:
            raise deaths[0] from error
        raise
    finally:
        over.set()
        watcher.join()
