"""The rollouts of the local engine: which examples a training step visits, and collecting their trajectories."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sorl_env.commands.command import run_async
from sorl_env.envs.text_env import TextEnv
from sorl_env.rollout import RolloutJob, RolloutSettings, Sampler, collect
from sorl_env.trajectory import Trajectory
from sorl_env.turns.tokens import Tokenizer
from sorl_train.config.run_settings import RolloutConfig
from sorl_train.config.seeds import derive_seed, generator


class LocalSampler(Sampler, Protocol):
    """A sampler in the trainer's process; ``model`` is the trainer's policy."""

    model: Any
    policy_version: int

    def session(self) -> AbstractContextManager[Any]:
        """Around one batch: takes the newest weights at its beginning and gives memory back at its end."""
        ...


def training_jobs(rollout: RolloutConfig, seed: int, num_examples: int, step: int) -> list[RolloutJob]:
    """The rollouts of a training step, counted from 1. Each example is visited once before any is visited again."""
    num_prompts = rollout.batch_size // rollout.group_size
    jobs = []
    for prompt in range(num_prompts):
        epoch, place = divmod((step - 1) * num_prompts + prompt, num_examples)
        index = _order(seed, epoch, num_examples)[place]
        jobs += _group(rollout.group_size, f"s{step}-p{prompt}", index, seed, "rollout", step, prompt)
    return jobs


def further_jobs(
    rollout: RolloutConfig,
    seed: int,
    num_examples: int,
    step: int,
    number: int,
    visited: Collection[int],
    prompts: int,
) -> list[RolloutJob]:
    """The rollouts of a further round of dynamic sampling: of ``prompts`` examples that the step has not visited yet.
    They are the next ones of an order that seed and step determine, not the examples of later steps: so nothing has to
    be remembered for a resume, and the run's own order still visits each example once. There are fewer rollouts where
    the examples run out. The round's ``number`` counts from 1."""
    order = _order(seed, step, num_examples, stream="dynamic_sampling")
    left = [index for index in order if index not in visited][:prompts]
    jobs = []
    for prompt, index in enumerate(left):
        group = f"s{step}-r{number}-p{prompt}"
        jobs += _group(rollout.group_size, group, index, seed, "dynamic", step, number, prompt)
    return jobs


def _group(size: int, group: str, index: int, seed: int, stream: str, *counters: int) -> list[RolloutJob]:
    return [
        RolloutJob(
            id=f"{group}/{member}",
            group_id=group,
            example_index=index,
            seed=derive_seed(seed, stream, *counters, member),
        )
        for member in range(size)
    ]


def evaluation_jobs(seed: int, num_examples: int, limit: int) -> list[RolloutJob]:
    """Rollouts of ``limit`` examples: a seeded sample, the same in every evaluation of a run."""
    order = _order(seed, 0, num_examples, stream="eval")[:limit]
    return [
        RolloutJob(id=f"e{i}", group_id=f"e{i}", example_index=i, seed=derive_seed(seed, "eval", i))
        for i in order
    ]


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int, stream: str = "data") -> list[int]:
    """A seeded permutation of the examples. Cached: a training step asks for it once for each prompt."""
    order: list[int] = generator(seed, stream, epoch).permutation(size).tolist()
    return order


def run_jobs(
    env: TextEnv,
    tokenizer: Tokenizer,
    sampler: LocalSampler,
    jobs: Sequence[RolloutJob],
    settings: RolloutSettings,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Collect the trajectories of all ``jobs``, in an event loop of their own."""
    trajectories: list[Trajectory] = []

    # returns nothing: run_async would format a result only to throw the text away
    async def main() -> None:
        trajectories.extend(await collect(env, tokenizer, sampler, jobs, settings, on_finish))

    with sampler.session():
        run_async(main())
    return trajectories
