"""When a worker dies, end the others, which would wait for it in a broadcast."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

POLL_S = 2.0


def started_workers() -> list[Any]:
    """A list to which OpenRLHF adds, in this process, each vLLM engine and each worker of a model that it starts."""
    from openrlhf.trainer import ray as openrlhf_ray
    from openrlhf.trainer.ray import launcher

    started: list[Any] = []
    create_engines, start_group = openrlhf_ray.create_vllm_engines, launcher.RayActorGroup._initiate_actors

    def create_vllm_engines(*args: Any, **kwargs: Any) -> list[Any]:
        engines: list[Any] = create_engines(*args, **kwargs)
        started.extend(engines)
        return engines

    def _initiate_actors(group: Any, *args: Any) -> None:
        start_group(group, *args)
        started.extend(group._actor_handlers)

    openrlhf_ray.create_vllm_engines = create_vllm_engines
    launcher.RayActorGroup._initiate_actors = _initiate_actors
    return started


@contextmanager
def watched(workers: Sequence[Any], poll_s: float = POLL_S) -> Iterator[None]:
    """Within a block that calls Ray actors, the death of one of ``workers`` ends the block, whatever it waits for.

    Ray reports a death only to callers of the dead actor. A training worker in a collective with it, or in a weight
    broadcast to a dead vLLM engine, waits on (the timeouts of gloo and NCCL are half an hour), and so does the
    trainer. The workers are asked every ``poll_s`` seconds. ``workers`` may grow meanwhile: a worker that dies while it
    starts ends the block as well. Raises the ``ActorDiedError`` of the worker that died first, instead of the error
    that its death caused.
    """
    deaths: list[ActorDiedError] = []
    over = threading.Event()

    def watch() -> None:
        # a busy actor answers when it is free; a call to a dead one fails at once
        calls: dict[ray.ObjectRef[Any], Any] = {}
        while not over.wait(poll_s):
            asked = set(calls.values())
            new = [worker for worker in list(workers) if worker not in asked]
            calls |= {worker.__ray_ready__.remote(): worker for worker in new}
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=poll_s) if calls else ([], [])
            for call in done:
                del calls[call]
                try:
                    ray.get(call)
                except ActorUnavailableError:  # a network that was gone for a moment: ask again
                    continue
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
