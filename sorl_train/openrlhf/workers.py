"""OpenRLHF's model workers, with the updates of ``learner.update`` on their DeepSpeed engines."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic, vllm_engine
from torch import Tensor

from sorl_train.config.files import read_resolved
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.backend import Backend
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.scoring import score
from sorl_train.learner.update import CriticUpdate, PolicyUpdate
from sorl_train.models.policy import VALUE_HEAD_FILE
from sorl_train.openrlhf.deepspeed_backend import DeepSpeedBackend, ValueHead
from sorl_train.openrlhf.flags import Placement
from sorl_train.openrlhf.rendezvous import rendezvous_port
from sorl_train.run.folder import RunDir

ACTOR, CRITIC = "_actor", "_critic"  # where OpenRLHF looks for shards in a checkpoint
SHARDS = "shards"  # the folder in there that DeepSpeed makes


def run_folder() -> RunDir:
    """The run's folder, which is on storage that all nodes share."""
    return RunDir(Path(os.environ["SORL_RUN_DIR"]))


def run_config() -> TrainConfig:
    """The run's settings, with the micro-batch sizes that DeepSpeed was started with."""
    config = read_resolved(run_folder().config)
    place, update = Placement.of(config.cluster), config.update
    micro = place.micro_batch(update.micro_batch_size, update.mini_batch_size)
    scored = place.micro_batch(update.log_prob_micro_batch_size, config.rollout.batch_size)
    sizes = dataclasses.replace(
        update, micro_batch_size=micro, critic_micro_batch_size=micro, log_prob_micro_batch_size=scored
    )
    return dataclasses.replace(config, update=sizes)


def policy_update(engine: Any, config: TrainConfig) -> PolicyUpdate:
    """The update of a DeepSpeed engine around a causal language model."""
    return PolicyUpdate(DeepSpeedBackend(engine, temperature=config.sampler.temperature), config)


def critic_update(engine: Any, config: TrainConfig) -> tuple[CriticUpdate, ValueHead]:
    """The update of a DeepSpeed engine around OpenRLHF's critic, and the head that takes the place of its own."""
    head = ValueHead(engine, config.optim)
    return CriticUpdate(DeepSpeedBackend(engine, head=head), config), head


def _score(batch: Batch, name: str, backend: Backend, size: int) -> Tensor:
    """Values or log-probabilities (B, T) of the policy's tokens, as ``score`` computes the field ``name``."""
    found = score(batch, {name: backend}, size)[name]
    torch.cuda.empty_cache()
    return found


class PolicyWorker(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class):
    """One rank of the actor. OpenRLHF loads, shards, saves and broadcasts the weights; the update is sorl's."""

    _get_free_port = staticmethod(rendezvous_port)

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Load the policy as OpenRLHF does, then check it and make the update."""
        ppo_actor.NaiveReplayBuffer = _no_buffer  # batches come as arguments of ``train_on``
        super().init_model_from_pretrained(*args, **kwargs)
        self.config = run_config()
        _check_loaded(self.actor.model, self.strategy.args)
        self.update = policy_update(self.actor.model, self.config)

    def score(self, batch: Batch) -> Tensor:
        """Log-probabilities (B, T) of the policy's tokens."""
        self.actor.eval()
        return _score(batch, "log_probs", self.update.backend, self.config.update.log_prob_micro_batch_size)

    def train_on(
        self, minis: list[Batch], done: int, sample: Batch, trust: dict[str, float] | None
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        """Train on this rank's share of a training step's mini-batches, after ``done`` optimizer steps.

        ``sample`` is its share of ``final_kl_sample``, ``trust`` the trust region's state after the training step
        before (None in the first). Returns metrics over all ranks, and the trust region's new state.
        """
        self.actor.train()
        update, means = self.update, Means()
        if update.trust is not None and trust is not None:
            update.trust.load_state_dict(trust)
        for _ in update.steps(minis, done, means):
            pass
        update.end_batch(sample, means)
        torch.cuda.empty_cache()  # several processes share the GPU, and torch would keep this one's peak
        return means.result(), None if update.trust is None else update.trust.state_dict()

    def save_state(self, folder: str, states: dict[str, Any]) -> None:
        """Write this rank's shards, with the trainer's ``states``, for a resume."""
        self.actor.model.save_checkpoint(folder, tag=SHARDS, client_state=states)

    def save_policy(self, folder: str) -> None:
        """Write the policy as a transformers folder."""
        self.strategy.save_model(self.actor, self.tokenizer, folder)

    def save_model(self) -> None:
        """Nothing to do at the end of the run: the last checkpoint holds the policy."""


class CriticWorker(ppo_critic.CriticModelActor.__ray_metadata__.modified_class):
    """One rank of the critic."""

    _get_free_port = staticmethod(rendezvous_port)

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Load the critic as OpenRLHF does, then check it and make the update."""
        ppo_critic.NaiveReplayBuffer = _no_buffer
        super().init_model_from_pretrained(*args, **kwargs)
        self.config, arguments = run_config(), self.strategy.args
        _check_loaded(self.critic, arguments)
        self.update, self.head = critic_update(self.critic, self.config)
        start = Path(arguments.critic.model_name_or_path)
        if arguments.ckpt.load_enable:
            self.head.load(Path(arguments.ckpt.path) / CRITIC)
        elif (start / VALUE_HEAD_FILE).is_file():
            self.head.load(start)

    def save_state(self, folder: str, states: dict[str, Any]) -> None:
        """Write this rank's shards; the first rank also writes the value head."""
        self.critic.save_checkpoint(folder, tag=SHARDS, client_state=states)
        if dist.get_rank() == 0:
            self.head.save(Path(folder))

    def score(self, batch: Batch) -> Tensor:
        """Values (B, T) of the policy's tokens."""
        self.critic.eval()
        return _score(batch, "values", self.update.backend, self.config.update.log_prob_micro_batch_size)

    def train_on(self, minis: list[Batch], done: int) -> dict[str, float]:
        """See ``PolicyWorker.train_on``."""
        self.critic.train()
        means = Means()
        for _ in self.update.steps(minis, done, means):
            pass
        torch.cuda.empty_cache()  # as in ``PolicyWorker.train_on``
        return means.result()


class ReferenceWorker(launcher.ReferenceModelActor.__ray_metadata__.modified_class):
    """One rank of the reference model."""

    _get_free_port = staticmethod(rendezvous_port)

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as OpenRLHF does; ``score`` is sorl's."""
        super().init_model_from_pretrained(*args, **kwargs)
        self.config = run_config()
        self.backend = DeepSpeedBackend(self.model.model, temperature=self.config.sampler.temperature)

    def score(self, batch: Batch) -> Tensor:
        """Log-probabilities (B, T) of the policy's tokens."""
        return _score(batch, "log_probs", self.backend, self.config.update.log_prob_micro_batch_size)


class RolloutWorker(vllm_engine.RolloutRayActor.__ray_metadata__.modified_class):
    """A vLLM engine that knows the version of its weights: how many training steps were done on them."""

    policy_version = 0
    _resumed: asyncio.Event | None = None  # set when the pause ends; None if there is no pause

    async def set_policy_version(self, version: int) -> None:
        """Called when the weights of this version have arrived, before the pause for them ends."""
        self.policy_version = version

    async def version_of_a_new_turn(self) -> int:
        """The version of the weights that sample a turn submitted now; waits until a pause has ended.

        The weights are never older than this version, which is set after they arrived. They can be newer for the turn's
        later tokens if partial rollouts continue through an update.
        """
        while self._resumed is not None:
            await self._resumed.wait()
        return self.policy_version

    async def pause_generation(self) -> None:
        """Stop sampling for new weights, in the middle of turns."""
        self._resumed = asyncio.Event()
        await super().pause_generation()

    async def resume_generation(self) -> None:
        """Continue the turns that were stopped, and let those begin that have waited."""
        await super().resume_generation()
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.set()


def _check_loaded(engine: Any, arguments: Any) -> None:
    """Raise an error if DeepSpeed found no checkpoint: it only logs that and keeps the weights it started with."""
    if arguments.ckpt.load_enable and engine.loaded_checkpoint_dp_world_size is None:
        raise RuntimeError(f"DeepSpeed loaded nothing from {arguments.ckpt.path}")


def _no_buffer(*_: Any, **__: Any) -> None:
    """Replaces OpenRLHF's replay buffer."""
