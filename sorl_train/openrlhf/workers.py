"""OpenRLHF's model workers with our losses: the updates of ``learner.update`` on DeepSpeed engines."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ray import ppo_actor, ppo_critic, vllm_engine
from torch import Tensor

from sorl_train.config.files import read_resolved
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import Means, NonFiniteError
from sorl_train.learner.settings import learning_rate, steps_of_batch
from sorl_train.learner.update import CriticUpdate, PolicyUpdate
from sorl_train.losses.clip_bias import Normalization
from sorl_train.losses.log_probs import TokenStats
from sorl_train.models.forward import logit_stats
from sorl_train.models.policy import VALUE_HEAD_FILE
from sorl_train.openrlhf.deepspeed_step import DeepSpeedStep
from sorl_train.openrlhf.flags import Placement
from sorl_train.openrlhf.value_head import ValueHead
from sorl_train.run.folder import RunDir

ACTOR, CRITIC = "_actor", "_critic"  # where OpenRLHF looks for shards in a checkpoint
SHARDS = "shards"  # the folder in there that DeepSpeed makes


def run_folder() -> RunDir:
    """The run's folder, which is on storage that all nodes share."""
    return RunDir(Path(os.environ["SORL_RUN_DIR"]))


def run_config() -> TrainConfig:
    """The run's settings, with the micro-batch sizes that DeepSpeed was started with."""
    config = read_resolved(run_folder().config)
    place, update = Placement.of(config), config.update
    micro = place.micro_batch(update.micro_batch_size, update.mini_batch_size)
    scored = place.micro_batch(update.log_prob_micro_batch_size, config.rollout.batch_size)
    sizes = dataclasses.replace(
        update, micro_batch_size=micro, critic_micro_batch_size=micro, log_prob_micro_batch_size=scored
    )
    return dataclasses.replace(config, update=sizes)


class DeepSpeedPolicyUpdate(PolicyUpdate):
    """``PolicyUpdate`` on a DeepSpeed engine around a causal language model."""

    def __init__(self, engine: Any, config: TrainConfig) -> None:
        super().__init__(engine.module, engine.optimizer, config)
        self._deepspeed = DeepSpeedStep(engine)

    def stats(self, micro: Batch, mask: Tensor, **wanted: bool) -> TokenStats:
        """As the base class's, through the engine, which gathers sharded weights."""
        logits = self._deepspeed.engine(input_ids=micro.token_ids[:, :-1], use_cache=False).logits[mask]
        temperature = self.config.sampler.temperature
        return logit_stats(logits, micro.token_ids, mask, temperature=temperature, **wanted)

    def _may_have_gradient(self, micro: Batch) -> bool:
        return True  # all ranks have to go through the backward pass together

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._deepspeed.backward(loss, last)

    def _apply(self, scales: Normalization, lr: float, mini: Batch) -> float:
        limit, rate = self.config.optim.max_grad_norm, lr * scales.update_scale
        grad_norm = self._deepspeed.apply(rate, scales.grad_scale, limit)
        return _finite(grad_norm, "the policy gradient", mini)

    def _weights(self) -> list[Tensor]:
        return self._deepspeed.weights()

    def _weights_moved(self) -> None:
        self._deepspeed.copy_weights()

    def _discard_gradient(self) -> None:
        self._deepspeed.discard_gradient()


class DeepSpeedCriticUpdate(CriticUpdate):
    """``CriticUpdate`` on a DeepSpeed engine around OpenRLHF's critic."""

    def __init__(self, engine: Any, config: TrainConfig) -> None:
        super().__init__(engine.module, engine.optimizer, config)
        self._deepspeed = DeepSpeedStep(engine)
        self.head = ValueHead(engine, config.optim)

    def values(self, micro: Batch) -> Tensor:
        """Values (B, T), float32, 0 off the policy's tokens."""
        columns = torch.arange(micro.token_ids.shape[1], device=micro.token_ids.device)
        lengths = micro.lengths.to(micro.token_ids.device)
        # without an action mask OpenRLHF's critic returns the outputs of its backbone and skips its bfloat16 head
        outputs = self._deepspeed.engine(
            micro.token_ids, attention_mask=(columns < lengths[:, None]).long(), return_output=True
        )
        mask = micro.action_mask
        values = self.head(outputs.last_hidden_state[:, :-1][mask])
        return torch.zeros(mask.shape, device=values.device).masked_scatter(mask, values)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._deepspeed.backward(loss, last)

    def _apply(self, lr: float, mini: Batch) -> float:
        finite = self.head.average_gradient()
        norm = _finite(self._deepspeed.apply(lr) if finite else math.nan, "the critic's gradient", mini)
        self.head.step(lr, norm)
        return norm


def _finite(grad_norm: float, what: str, mini: Batch) -> float:
    if not math.isfinite(grad_norm):
        raise NonFiniteError(what, mini.ids)
    return grad_norm


def _rates(config: TrainConfig, base: float, warmup: float, done: int) -> Iterator[float]:
    """The learning rates of the optimizer steps after the first ``done`` of the run."""
    total = config.update.steps * steps_of_batch(config)
    return (learning_rate(config.optim, base, warmup, number, total) for number in itertools.count(done))


@torch.no_grad()
def _score(batch: Batch, size: int, compute: Callable[[Batch], Tensor]) -> Tensor:
    """Values (B, T) that ``compute`` returns for micro-batches of ``size`` rows, as float32 on the CPU."""
    rows = torch.zeros(batch.action_mask.shape)
    for index, micro in batch.micro_batches(size):
        part = compute(micro.to(torch.device(torch.cuda.current_device())))
        rows[index, : part.shape[1]] = part.float().cpu()
    torch.cuda.empty_cache()
    return rows


class PolicyWorker(ppo_actor.PolicyModelActor.__ray_metadata__.modified_class):
    """One rank of the actor. OpenRLHF loads, shards, saves and broadcasts the weights; the update is sorl's."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        ppo_actor.NaiveReplayBuffer = _no_buffer  # batches come as arguments of ``train_on``
        super().init_model_from_pretrained(*args, **kwargs)
        self.config = run_config()
        _check_loaded(self.actor.model, self.strategy.args)
        self.update = DeepSpeedPolicyUpdate(self.actor.model, self.config)

    def score(self, batch: Batch) -> Tensor:
        """Log-probabilities (B, T) of the policy's tokens."""
        self.actor.eval()
        size = self.config.update.log_prob_micro_batch_size
        return _score(batch, size, lambda micro: self.update.stats(micro, micro.action_mask).log_probs)

    def train_on(
        self, minis: list[Batch], done: int, sample: Batch, trust: dict[str, float] | None
    ) -> tuple[dict[str, float], dict[str, float] | None]:
        """Train on this rank's share of a training step's mini-batches, up to ``update.target_kl``.

        Args:
            done: optimizer steps before this training step.
            sample: this rank's share of the trajectories of ``final_kl_sample``.
            trust: the trust region's state after the training step before; None in the first.

        Returns:
            Metrics over all ranks, and the trust region's new state.
        """
        self.actor.train()
        update, optim, means = self.update, self.config.optim, Means()
        if update.trust is not None and trust is not None:
            update.trust.load(trust)
        update.begin_batch()
        for mini, lr in zip(minis, _rates(self.config, optim.lr, optim.warmup_ratio, done), strict=False):
            update.step(mini, lr, means)
            if update.past_target_kl:
                break
        update.end_batch(sample, means)
        torch.cuda.empty_cache()  # several processes share the GPU, and torch would keep this one's peak
        return means.result(), None if update.trust is None else update.trust.state()

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

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        ppo_critic.NaiveReplayBuffer = _no_buffer
        super().init_model_from_pretrained(*args, **kwargs)
        self.config, arguments = run_config(), self.strategy.args
        _check_loaded(self.critic, arguments)
        self.update = DeepSpeedCriticUpdate(self.critic, self.config)
        start = Path(arguments.critic.model_name_or_path)
        if arguments.ckpt.load_enable:
            self.update.head.load(Path(arguments.ckpt.path) / CRITIC)
        elif (start / VALUE_HEAD_FILE).is_file():
            self.update.head.load(start)

    def save_state(self, folder: str, states: dict[str, Any]) -> None:
        """Write this rank's shards; the first rank also writes the value head."""
        self.critic.save_checkpoint(folder, tag=SHARDS, client_state=states)
        if dist.get_rank() == 0:
            self.update.head.save(Path(folder))

    def score(self, batch: Batch) -> Tensor:
        """Values (B, T) of the policy's tokens."""
        self.critic.eval()
        return _score(batch, self.config.update.log_prob_micro_batch_size, self.update.values)

    def train_on(self, minis: list[Batch], done: int) -> dict[str, float]:
        """See ``PolicyWorker.train_on``."""
        self.critic.train()
        optim, means = self.config.optim, Means()
        rates = _rates(self.config, optim.critic_lr, optim.critic_warmup_ratio, done)
        for mini, lr in zip(minis, rates, strict=False):
            self.update.step(mini, lr, means)
        torch.cuda.empty_cache()  # as in ``PolicyWorker.train_on``
        return means.result()


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
