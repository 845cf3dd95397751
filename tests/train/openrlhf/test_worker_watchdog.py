"""A worker that dies while another one waits for it: real Ray actors, one in a wait without an end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="OpenRLHF has an environment of its own (make openrlhf)")
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from sorl_train.openrlhf.worker_watchdog import started_workers, watched

pytestmark = [pytest.mark.openrlhf, pytest.mark.usefixtures("importable")]


@pytest.fixture(scope="module")
def remote() -> Iterator[Any]:
    class Worker:
        def process_id(self) -> int:
            return os.getpid()

        def wait_for_the_others(self) -> None:
            """As a collective whose other end is gone."""
            threading.Event().wait()

        def fail(self) -> None:
            raise ValueError("a bad batch")

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray.remote(Worker)
    ray.shutdown()


def test_the_death_of_a_worker_ends_a_wait_for_another(remote: Any) -> None:
    victim, waiting = remote.options(name="victim").remote(), remote.remote()
    process_id = ray.get(victim.process_id.remote())
    killer = threading.Timer(1.5, os.kill, (process_id, signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(ActorDiedError) as caught, watched([victim, waiting], poll_s=0.5):
        ray.get(waiting.wait_for_the_others.remote(), timeout=120)
    assert time.monotonic() - started < 60
    assert caught.value.actor_id == victim._actor_id.hex()  # the one that died, not the one ended for it


def test_the_watcher_goes_on_after_a_worker_was_out_of_reach(
    remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose connection is lost and comes back."""
    victim, waiting, get, lost = remote.remote(), remote.remote(), ray.get, threading.Event()
    process_id = get(victim.process_id.remote())

    def get_after_a_loss(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "watched" and not lost.is_set():
            lost.set()
            os.kill(process_id, signal.SIGKILL)
            raise ActorUnavailableError("the connection is lost", None)
        return get(*args, **kwargs)

    monkeypatch.setattr(ray, "get", get_after_a_loss)
    with pytest.raises(ActorDiedError) as caught, watched([victim, waiting], poll_s=0.2):
        get(waiting.wait_for_the_others.remote(), timeout=60)
    assert lost.is_set() and caught.value.actor_id == victim._actor_id.hex()


def test_the_death_of_a_worker_that_is_still_starting_ends_a_wait_for_another(remote: Any) -> None:
    """As a vLLM engine for which there is no memory, while the policy waits for its engines to join a group."""

    class Dies:
        def __init__(self, *rank: Any) -> None:
            raise MemoryError("no blocks for the cache")

    from openrlhf.trainer.ray import launcher

    waiting, started = remote.remote(), started_workers()
    with pytest.raises(ActorDiedError, match="no blocks for the cache"), watched(started, poll_s=0.5):
        started.append(waiting)
        wait = waiting.wait_for_the_others.remote()
        launcher.RayActorGroup(1, 1, ray.remote(Dies), num_gpus_per_actor=0)
        ray.get(wait, timeout=120)
    assert len(started) == 2


def test_an_exception_of_a_live_worker_passes_through(remote: Any) -> None:
    worker = remote.remote()
    with pytest.raises(ValueError, match="a bad batch"), watched([worker], poll_s=0.2):
        ray.get(worker.fail.remote())
    with watched([worker], poll_s=0.2):
        time.sleep(1.0)
    assert ray.get(worker.process_id.remote()) > 0  # nobody ended it
