"""Our training step in OpenRLHF's single controller: score, estimate advantages, update, log, save.

OpenRLHF drives rollouts, queues and weight transfers. What a step is stands in ``TrainStep``, which its synchronous
and its asynchronous trainer (``trainers``) share, and follows ``engines.local.trainer``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from ray.exceptions import RayTaskError
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.token_classes import TokenClassifier
from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import write_jsonl
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.mismatch import check_mismatch, mismatch_limit, sampled_by
from sorl_train.learner.schedule import mini_batches, steps_of_batch
from sorl_train.learner.scored_batch import batch_metrics, estimate_advantages, mismatch_metrics
from sorl_train.learner.update import NonFiniteError
from sorl_train.openrlhf.bookkeeping import MAX_LOST_STEPS, Bookkeeping
from sorl_train.openrlhf.placement import Placement
from sorl_train.openrlhf.prompts import evaluation_loader, exclude_older
from sorl_train.openrlhf.saves import step_of
from sorl_train.openrlhf.workers import run_config, run_folder
from sorl_train.rollout.environments import answers_of, make_env, training_examples
from sorl_train.rollout.metrics import (
    eval_metrics,
    rollout_metrics,
    search_off_metrics,
    staleness,
)
from sorl_train.run.alarm import alarm_so_far, append_event, drop_events_after
from sorl_train.run.metrics_log import MetricsLog
from sorl_train.run.summary import Summary


class Ended(Exception):
    """The policy has collapsed or is about to, and ``eval.patience`` or the alarm ends the run."""


class Stopped(RuntimeError):
    """The run was asked to stop, and has saved what it had."""


class TrajectoryGenerator(SamplesGenerator):
    """OpenRLHF's dispatch of prompts to vLLM actors; samples stay trajectories."""

    def _process_response_into_experience(self, response: dict[str, Any], **_: Any) -> Trajectory:
        trajectory: Trajectory = response["trajectory"]
        return trajectory


class TrainStep(Bookkeeping):
    """A training step for a subclass of OpenRLHF's ``BasePPOTrainer``."""

    # of BasePPOTrainer
    args: Any
    tokenizer: Any
    vllm_engines: Any
    actor_model_group: Any
    critic_model_group: Any
    reference_model_group: Any
    strategy: Any
    broadcast_to_vllm: Callable[[], None]  # with ``trainers.Announcing``, the number of the weights, too
    version: int  # training steps done

    def begin(self, states: dict[str, Any]) -> None:
        """Open the run's folder at the step of ``states`` (0 for a new run), and evaluate before the first one."""
        self.config = run_config()
        self.run_dir = run_folder()
        self.place = Placement.of(self.config)
        self.lost_steps = 0
        self.timings: dict[str, float] = {}
        self.begun = time.perf_counter()  # the step that is under way
        self.metrics: dict[str, float] = {}
        self.summary = Summary.from_state(states["summary"]) if "summary" in states else Summary()
        self.log = MetricsLog(
            self.run_dir, tensorboard=self.config.log.tensorboard, wandb=self.config.log.wandb
        )
        self.log.truncate_after(self.version if self.version else -1)
        drop_events_after(self.run_dir, self.version)
        self.alarm = alarm_so_far(self.config.alarm, self.run_dir, self.version)
        self.classify = TokenClassifier(self.tokenizer)
        self.eval_env = make_env(self.config, evaluation=True)
        self.answers = answers_of(training_examples(self.config))
        self.evaluator = TrajectoryGenerator(self.strategy, None, None, self.tokenizer, self.vllm_engines)
        if self.version == 0:
            metrics = self.evaluate_policy(self.config.eval.num_examples_final)
            self.record(0, metrics | self.take_timings([]))

    def train_step(
        self, trajectories: Sequence[Trajectory], global_step: int
    ) -> tuple[dict[str, float], int]:
        """What OpenRLHF calls with each rollout batch."""
        step = global_step + 1
        oldest = self.version - self.config.rollout.max_staleness
        trajectories = sorted(exclude_older(trajectories, oldest), key=lambda t: (t.group_id, t.id))
        metrics = rollout_metrics(trajectories, self.answers) | staleness(trajectories, self.version)
        usable = any(not t.excluded for t in trajectories)
        if usable:
            try:
                with self.timed("log_probs"):
                    batch, recomputed = self.score(self.collate(trajectories))
                self.check_mismatch(recomputed, batch, trajectories, step)
                batch = estimate_advantages(batch, self.config.algorithm.advantage, self.config.loss)
                with self.timed("update"):
                    metrics |= self.update(batch, step) | batch_metrics(batch)
                metrics |= mismatch_metrics(recomputed, batch)
            except (NonFiniteError, RayTaskError) as error:
                self.dump_if_non_finite(error, trajectories, step)
                raise
        self.version = step
        with self.timed("broadcast"):
            if usable:
                self.broadcast_to_vllm()
            else:
                self.announce_version()
        self.save_trajectories(step, trajectories)
        self.metrics, self.trajectories = metrics, trajectories
        self.lost_steps = 0 if usable else self.lost_steps + 1
        return {}, step

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: Any = None
    ) -> None:
        """Evaluate, log, keep the best policy, save; OpenRLHF calls it after each step."""
        config, steps = self.config, self.config.update.steps
        self.timings["time/rollout_s"] = float((logs_dict or {}).get("timing/generation", 0.0))
        metrics = self.metrics
        if global_step == steps:
            metrics |= self.evaluate_policy(config.eval.num_examples_final)
            if config.eval.search_off:
                metrics |= self.evaluate_policy(config.eval.num_examples_final, search_off=True)
        elif config.eval.every and global_step % config.eval.every == 0:
            metrics |= self.evaluate_policy(config.eval.num_examples)
        self.record(global_step, metrics | self.take_timings(self.trajectories))
        lost = self.lost_steps == MAX_LOST_STEPS
        stop = self.run_dir.stop_file.exists()
        every = config.checkpoint.every
        ended = self.watch(global_step, metrics)
        if stop or lost or ended or global_step == steps or (every and global_step % every == 0):
            self.save(global_step, dict(client_states or {}))
        if lost:
            raise UserError(self.why_lost())
        if ended:
            raise Ended
        if stop and global_step < steps:
            raise Stopped(f"stopped after step {global_step}")

    def workers(self) -> list[Any]:
        """All that sample, score or train."""
        groups = (self.actor_model_group, self.critic_model_group, self.reference_model_group)
        return [
            *self.vllm_engines,
            *(actor for group in groups if group is not None for actor in group._actor_handlers),
        ]

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        return collate(trajectories, self.tokenizer.pad_token_id, self.classify)

    # -- the parts of a step --------------------------------------------------------------------------------------

    def score(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Fill in old and reference log-probabilities and values; returns the newest weights' log-probabilities, too.

        Old log-probabilities are the trainer's where the newest weights sampled the batch. An asynchronous batch is
        older than the trainer's weights, and the ratio is to measure that: there they are the sampler's own.
        """
        recomputed = self.score_with(self.actor_model_group, batch)
        behind = self.config.cluster.async_rollout
        fields = {"old_log_probs": batch.rollout_log_probs if behind else recomputed}
        if self.critic_model_group is not None:
            values = self.score_with(self.critic_model_group, batch)
            fields["values"] = values.masked_fill_(~batch.action_mask, 0.0)
        if self.reference_model_group is not None:
            fields["ref_log_probs"] = self.reference_log_probs(batch)
        for name, figures in {**fields, "recomputed": recomputed}.items():
            broken = (~torch.isfinite(figures)).any(dim=1).nonzero()[:, 0].tolist()
            if broken:
                raise NonFiniteError(f"one of the {name}", tuple(batch.ids[i] for i in broken))
        return batch.with_fields(**fields), recomputed

    def check_mismatch(
        self, log_probs: Tensor, batch: Batch, trajectories: Sequence[Trajectory], step: int
    ) -> None:
        """End the run where the newest weights sampled a turn and now say something else of it than vLLM did."""
        check_mismatch(
            log_probs,
            batch,
            sampled_by(self.version, trajectories, batch),
            limit=mismatch_limit(self.config, torch.bfloat16),
            decode=self.tokenizer.decode,
            path=self.run_dir.path / f"mismatch_{step:06d}.jsonl",
            step=step,
        )

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """From OpenRLHF's reference workers, which take micro-batches."""
        size = self.place.micro_batch(self.config.update.log_prob_micro_batch_size, len(batch))
        micros = list(batch.micro_batches(size))
        refs = self.reference_model_group.async_run_method_batch(
            "forward",
            sequences=[micro.token_ids for _, micro in micros],
            action_mask=[micro.action_mask for _, micro in micros],
            attention_mask=[_attention_mask(micro) for _, micro in micros],
        )
        found = [part for parts in ray.get(refs) for part in parts]
        ray.get(self.reference_model_group.async_run_method("empty_cache"))
        return _spread(batch, [index for index, _ in micros], found)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimizer steps of one rollout batch, critic and actor; each rank takes its share of a mini-batch."""
        config, ranks = self.config, self.place.ranks
        minis = list(mini_batches(batch, config, step))
        shares: list[list[Batch]] = [[] for _ in range(ranks)]
        for mini in minis:
            order = torch.argsort(mini.lengths, descending=True, stable=True)
            for rank in range(ranks):
                shares[rank].append(mini.rows(order[rank::ranks]))
        per_step = steps_of_batch(config)
        counts = {"done": [(step - 1) * per_step] * ranks, "total": [config.update.steps * per_step] * ranks}
        metrics: dict[str, float] = {}
        groups = [self.critic_model_group]
        if step > config.update.critic_warmup_steps:
            groups.append(self.actor_model_group)
        for group in groups:
            if group is not None:
                metrics |= self.run_group_awake(group, "train_on", minis=shares, **counts)[0]
        return metrics

    def run_group_awake(self, group: Any, method: str, **arguments: list[Any]) -> list[Any]:
        """``run_group`` with the optimizer's state on the GPU: where models share one, it sleeps in between."""
        if not self.args.ds.enable_sleep:
            return self.run_group(group, method, **arguments)
        ray.get(group.async_run_method(method_name="reload_states"))
        results = self.run_group(group, method, **arguments)
        ray.get(group.async_run_method(method_name="offload_states"))
        return results

    def run_group(self, group: Any, method: str, **arguments: list[Any]) -> list[Any]:
        """``method`` on each rank with its item of each list; what the ranks return."""
        by_rank = ray.get(group.async_run_method_batch(method, **arguments))
        return [result for results in by_rank for result in results]

    def score_with(self, group: Any, batch: Batch) -> Tensor:
        """The (B, T) figures that a group's ranks compute, each of its share of the rows."""
        order = torch.argsort(batch.lengths, descending=True, stable=True)
        indices = [order[rank :: self.place.ranks] for rank in range(self.place.ranks)]
        parts = self.run_group(group, "score", batch=[batch.rows(index) for index in indices])
        return _spread(batch, indices, parts)

    def evaluate_policy(self, limit: int, *, search_off: bool = False) -> dict[str, float]:
        """Success on the evaluation split, drawn as by the local engine: greedy unless ``eval.temperature`` says so."""
        temperature = self.config.eval.temperature
        kind = "search_off" if search_off else "eval"
        examples = len(self.eval_env.examples.examples)
        self.evaluator.eval_dataloader = evaluation_loader(self.config, examples, limit, kind)
        with self.timed("eval"):
            trajectories = self.evaluator.generate_eval_samples(
                temperature=temperature,
                top_p=self.config.sampler.top_p if temperature else 1.0,
                n_samples_per_prompt=1,
                max_len=None,
            )
        if search_off:
            return search_off_metrics(trajectories)
        trajectories = sorted(trajectories, key=lambda t: t.id)
        write_jsonl(self.run_dir.trajectories / f"eval_{self.version:06d}.jsonl", trajectories)
        return eval_metrics(trajectories)

    def watch(self, step: int, metrics: dict[str, float]) -> bool:
        """Look for a collapse, coming or come; True when the config wants the run to end over it."""
        alarm, action = self.alarm.observe(step, metrics), self.config.alarm.action
        if alarm is not None:
            append_event(self.run_dir, alarm.event(action))
        out_of_patience = 0 < self.config.eval.patience <= self.summary.evaluations_below
        return out_of_patience or (alarm is not None and action == "stop")

    def init_checkpoint_states(self) -> dict[str, Any]:
        """OpenRLHF's, which it asks for before anything is sampled.

        Raises:
            UserError: the policy's workers did not load the checkpoint that the run was to go on from.
        """
        states: dict[str, Any] = super().init_checkpoint_states()  # type: ignore[misc]
        self.version = int(states.get("global_step", 0))
        if self.args.ckpt.load_enable and self.version != step_of(Path(self.args.ckpt.path)):
            raise UserError(
                f"{self.args.ckpt.path} was to be loaded, and the state loaded is of step {self.version}"
            )
        return states

    def announce_version(self) -> None:
        """Tell the vLLM engines how many training steps their weights have behind them.

        It is called while nobody samples (``trainers.Announcing``), or when the weights did not change.
        """
        batch_vllm_engine_call(self.vllm_engines, "set_policy_version", self.version)


def _attention_mask(batch: Batch) -> Tensor:
    return (torch.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]).long()


def _spread(batch: Batch, indices: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Rows computed in pieces, back in the batch's order: float32 (B, T), 0 in the padding."""
    whole = torch.zeros(batch.action_mask.shape)
    for index, part in zip(indices, parts, strict=True):
        whole[index, : part.shape[1]] = part.float()
    return whole
