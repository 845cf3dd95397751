"""OpenRLHF's trainers with our training step and our prompts, which ``driver`` puts in the place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async

from sorl_train.learner.update_settings import steps_of_batch
from sorl_train.openrlhf.prompts import JobLoader, training_loader
from sorl_train.openrlhf.train_step import TrainStep, TrajectoryGenerator
from sorl_train.openrlhf.workers import run_config
from sorl_train.rollout.environments import training_examples

_PPOTrainer = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
_TrainingActor = ppo_trainer_async.TrainingActor.__ray_metadata__.modified_class
_GenerateSamplesActor = ppo_trainer_async.GenerateSamplesActor.__ray_metadata__.modified_class
_PPOTrainerAsync = ppo_trainer_async.PPOTrainerAsync.__ray_metadata__.modified_class


def prepare_loaders(strategy: Any, tokenizer: Any) -> tuple[JobLoader, None, int]:
    """Replaces OpenRLHF's ``prepare_datasets``: our prompts in our order, and no evaluation by OpenRLHF."""
    config = run_config()
    examples = training_examples(config)
    rollout, update = config.rollout, config.update
    loader = training_loader(rollout, config.seed, update.steps, len(examples))
    return loader, None, update.steps * steps_of_batch(rollout.batch_size, update)


class Announcing(ppo_trainer.BasePPOTrainer):
    """Sends new weights and their version together, for the asynchronous trainer.

    OpenRLHF's asynchronous trainer calls ``super().broadcast_to_vllm`` while it holds a lock (or has paused the vLLM
    engines), and this class comes right after it in the order of base classes. A version that came after the lock is
    free would come too late for turns that begin at once.
    """

    announce_version: Callable[[], None]

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the vLLM engines, and then their version."""
        super().broadcast_to_vllm()
        self.announce_version()


class Trainer(TrainStep, _PPOTrainer):  # type: ignore[misc, valid-type]
    """Samples and trains in turns on the same GPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ppo_trainer.prepare_datasets = prepare_loaders
        ppo_trainer.SamplesGenerator = TrajectoryGenerator
        super().__init__(*args, **kwargs)

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the vLLM engines, and then their version; no engine samples meanwhile.

        It cannot be inherited from ``Announcing``: Ray copies inherited methods into the class that it makes of
        OpenRLHF's trainer, so the methods of a base class after that one are never called.
        """
        super().broadcast_to_vllm()
        self.announce_version()


class AsyncTrainingActor(TrainStep, _TrainingActor, Announcing):  # type: ignore[misc, valid-type]
    """Trains on the batches that ``AsyncGenerator`` puts into a queue."""

    def evaluate_policy(self, limit: int, search_off: bool = False) -> dict[str, float]:
        """See ``TrainStep``; meanwhile no weight changes."""
        ray.get(self.vllm_lock.acquire.remote())
        try:
            return super().evaluate_policy(limit, search_off)
        finally:
            ray.get(self.vllm_lock.release.remote())


class AsyncGenerator(_GenerateSamplesActor):  # type: ignore[misc, valid-type]
    """Samples ahead of the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ppo_trainer_async.prepare_datasets = prepare_loaders
        ppo_trainer_async.SamplesGenerator = TrajectoryGenerator
        super().__init__(*args, **kwargs)


class AsyncTrainer(_PPOTrainerAsync):  # type: ignore[misc, valid-type]
    """Starts ``AsyncGenerator`` and ``AsyncTrainingActor``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ppo_trainer_async.GenerateSamplesActor = ray.remote(AsyncGenerator)
        ppo_trainer_async.TrainingActor = ray.remote(AsyncTrainingActor)
        super().__init__(*args, **kwargs)
