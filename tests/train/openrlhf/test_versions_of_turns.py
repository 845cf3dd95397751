"""The policy version of a turn is that of the weights that draw it: real Ray actors, OpenRLHF's lock and trainer.

What stands in for vLLM is a generator that draws one token, the number of its weights; what stands in for the training
workers is a call that changes that number. Everything between them is what a run uses.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_train.openrlhf.launch import CPU_ENVIRONMENT, import_folders

pytestmark = pytest.mark.openrlhf
UPDATES = 12
ENGINES = 2


@pytest.fixture(scope="module", autouse=True)
def cluster(importable: None) -> Iterator[None]:
    import ray

    variables = CPU_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(import_folders(on_cpu=True))}
    ray.init(
        address="local",
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()


def engine_class() -> Any:
    """A ``RolloutWorker`` without vLLM."""
    import ray

    from sorl_env.rollout import SamplingParams
    from sorl_train.openrlhf.agent import EngineSampler
    from sorl_train.openrlhf.workers import RolloutWorker

    class Generator:
        def __init__(self) -> None:
            self.weights = 0
            self.running = asyncio.Event()
            self.running.set()

        async def generate(self, *_: Any, **__: Any) -> Any:
            await self.running.wait()
            token = self.weights  # the first token is drawn now
            await asyncio.sleep(0.002)
            log_probs = [{token: SimpleNamespace(logprob=0.0)}]
            turn = SimpleNamespace(
                token_ids=[token], logprobs=log_probs, finish_reason="length", stop_reason=None
            )
            yield SimpleNamespace(outputs=[turn])

        async def pause_generation(self, mode: str) -> None:
            self.running.clear()

        async def resume_generation(self) -> None:
            self.running.set()

    class Engine(RolloutWorker):
        def __init__(self) -> None:
            self.llm = Generator()
            self._mm_pad_token_ids = set()

        async def new_weights(self, version: int) -> None:
            await asyncio.sleep(0.005)
            self.llm.weights = version

        async def turn(self) -> tuple[int, int]:
            """Its version as the trajectory would have it, and the weights that drew it."""
            params = SamplingParams(max_new_tokens=1, temperature=1.0, top_p=1.0, stop=(), seed=0)
            drawn = await EngineSampler(self).generate("session", [1], params)
            return drawn.policy_version, drawn.token_ids[0]

    return ray.remote(Engine).options(max_concurrency=64)


def trainer(engines: list[Any], lock: Any, *, partial: bool) -> Any:
    """An asynchronous trainer that has engines and a lock, and nothing else."""
    from sorl_train.openrlhf.trainers import AsyncTrainingActor

    class Trainer(AsyncTrainingActor):
        def __init__(self) -> None:
            self.vllm_engines, self.vllm_lock, self._partial_rollout = engines, lock, partial
            self.args = SimpleNamespace(vllm=SimpleNamespace(enable_sleep=False))
            self.version = 0
            self.actor_model_group = SimpleNamespace(async_run_method=self.send)

        def send(self, method_name: str) -> list[Any]:
            assert method_name == "broadcast_to_vllm"
            return [engine.new_weights.remote(self.version) for engine in engines]

        def announce_version(self) -> None:
            time.sleep(0.02)  # a slow network
            super().announce_version()

    return Trainer()


@pytest.mark.parametrize("partial", [False, True], ids=["between batches", "through updates"])
def test_no_turn_has_the_number_of_other_weights(partial: bool) -> None:
    import ray
    from openrlhf.trainer.ppo_trainer_async import VLLMLock

    make = engine_class()
    engines = [make.remote() for _ in range(ENGINES)]
    lock = VLLMLock.remote()
    training = trainer(engines, lock, partial=partial)
    turns: list[tuple[int, int]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            if not partial:
                ray.get(lock.acquire.remote())
            turns.extend(ray.get([engine.turn.remote() for engine in engines for _ in range(4)]))
            if not partial:
                ray.get(lock.release.remote())

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        for version in range(1, UPDATES + 1):
            training.version = version
            training.broadcast_to_vllm()
            time.sleep(0.03)
    finally:
        over.set()
        sampling.join()
    assert len(turns) > 50 and {weights for _, weights in turns} >= {1, UPDATES - 1}
    assert [(version, weights) for version, weights in turns if version != weights] == []
    for engine in engines:
        ray.kill(engine)
