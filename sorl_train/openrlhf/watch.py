"""Workers that die: the others are ended, so that nobody waits for the dead in a broadcast."""

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
    """Run a block that calls Ray actors; the death of one of ``workers`` ends it, whatever the block waits for.

    Ray tells only those who wait for the dead actor itself. A training worker in the middle of a collective, or of a
    weight broadcast to a vLLM engine that is gone, hears nothing (gloo's and NCCL's own limits are half an hour), and
    so neither does the trainer, which waits for that worker.

    Raises:
        ray.exceptions.ActorDiedError: of the worker that died first, in the place of what its death caused.
    """
    deaths: list[ActorDiedError] = []
    over = threading.Event()

    def watch() -> None:
        # a busy actor answers once it is free; a dead one's call fails at once
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
        # Whoever waited for the dead worker may hear of it before the watcher does.
        watcher.join(2 * poll_s)
        if deaths:
            raise deaths[0] from error
        raise
    finally:
        over.set()
        watcher.join()
