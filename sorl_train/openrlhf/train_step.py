"""Our training step in OpenRLHF's single controller: score, estimate advantages, update, log, save.

OpenRLHF drives rollouts, queues and weight transfers. ``TrainStep`` is what its synchronous and its asynchronous
trainer (``trainers``) do with a rollout batch: the same as ``train_rl.train`` does on one machine.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from ray.exceptions import RayTaskError
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.trajectory import Trajectory, write_jsonl
from sorl_env.trajectory.token_classes import TokenClassifier
from sorl_train.config.files import read_resolved
from sorl_train.learner.advantages import batch_metrics, mismatch_metrics, prepare
from sorl_train.learner.batch import Batch, by_rank, collate, put_together, rows_by_rank
from sorl_train.learner.dapo import overlong_metrics, shape_and_filter
from sorl_train.learner.mismatch import check_mismatch, mismatch_limit, sampled_by
from sorl_train.learner.optimizer_step import NonFiniteError
from sorl_train.learner.scoring import with_scores
from sorl_train.learner.trust_region import final_kl_sample
from sorl_train.learner.update_settings import mini_batches, steps_of_batch
from sorl_train.models.policy import model_shape
from sorl_train.openrlhf.flags import Placement
from sorl_train.openrlhf.prompts import evaluation_loader, exclude_older
from sorl_train.openrlhf.workers import ACTOR, CRITIC, run_config, run_folder
from sorl_train.rollout.environments import make_env, training_examples
from sorl_train.rollout.metrics import (
    answers_of,
    eval_metrics,
    rollout_metrics,
    search_off_metrics,
    staleness,
    tool_timings,
)
from sorl_train.run.checkpoint import step_of
from sorl_train.run.display import Display, saved_on_error
from sorl_train.run.recorder import Recorder

HASHED_BYTES = 64_000_000  # larger files are checked by size alone: reading 200 GB again would take minutes


class Ended(Exception):
    """``eval.patience`` or the collapse alarm ends the run before its last step."""


class Stopped(RuntimeError):
    """The user asked the run to stop, and its checkpoint is written."""


class TrajectoryGenerator(SamplesGenerator):
    """OpenRLHF's dispatch of prompts to vLLM actors, which keeps samples as trajectories."""

    def _process_response_into_experience(self, response: dict[str, Any], **_: Any) -> Trajectory:
        trajectory: Trajectory = response["trajectory"]
        return trajectory


class TrainStep:
    """A training step for a subclass of OpenRLHF's ``BasePPOTrainer``."""

    # set by BasePPOTrainer
    args: Any
    tokenizer: Any
    vllm_engines: Any
    actor_model_group: Any
    critic_model_group: Any
    reference_model_group: Any
    strategy: Any
    broadcast_to_vllm: Callable[[], None]  # and their version, in ``trainers``
    version: int  # training steps done
    unsaved: tuple[int, dict[str, Any]] | None = None  # a recorded step to save, with OpenRLHF's states

    def fit(self, global_step: int = 0) -> None:
        """The whole run."""
        self.init_checkpoint_states()
        self.begin()
        with closing(self.recorder):
            with suppress(Ended), saved_on_error(self.save, self.recorder.display):
                if not self.recorder.ended:  # it was killed between its last checkpoint and its summary
                    super().fit(global_step)  # type: ignore[misc]
            self.end()

    def begin(self) -> None:
        """Open the run's folder at the step of the loaded checkpoint; a new run evaluates the policy first."""
        self.config, self.run_dir = run_config(), run_folder()
        self.place = Placement.of(self.config.cluster)
        self.trust: dict[str, float] | None = None  # the workers' trust region after the last step
        self.check_mismatch = partial(
            check_mismatch,
            limit=mismatch_limit(self.config.sampler, torch.bfloat16, served=True),
            top_p=self.config.sampler.top_p,
            decode=self.tokenizer.decode,
            folder=self.run_dir.path,
        )
        self.classify = TokenClassifier(self.tokenizer)
        self.eval_env = make_env(self.config, evaluation=True)
        self.answers = answers_of(training_examples(self.config))
        self.evaluator = TrajectoryGenerator(self.strategy, None, None, self.tokenizer, self.vllm_engines)
        self.evaluator.args = copy.deepcopy(self.args)
        saved_config = read_resolved(self.run_dir.config)  # without the micro-batch sizes of this process
        log = Display(sys.stdout)  # the user sees another display, that of ``launch``
        self.recorder = Recorder(saved_config, self.run_dir, self.eval_env.task, log, HASHED_BYTES)
        log.start(f"training steps of {self.run_dir.path}", self.config.update.steps, self.version)
        if self.version:
            self.trust = self.recorder.restore(Path(self.args.ckpt.path)).get("trust")
        elif self.recorder.record(0, self.evaluate_policy(self.config.eval.num_examples_final)):
            self.recorder.save_best(0, self.save_policy)

    def end(self) -> None:
        """Write the summary, which marks the run as finished."""
        parameters = model_shape(self.args.actor.model_name_or_path).parameters
        is_sample = make_env(self.config).examples.is_sample or self.eval_env.examples.is_sample
        self.recorder.finish({"steps": self.version, "parameters": parameters, "is_sample": is_sample})

    def train_step(
        self, trajectories: Sequence[Trajectory], global_step: int
    ) -> tuple[dict[str, float], int]:
        """What OpenRLHF calls with each rollout batch."""
        step, self.unsaved = global_step + 1, None
        oldest = self.version - self.config.rollout.max_staleness
        trajectories = sorted(exclude_older(trajectories, oldest), key=lambda t: (t.group_id, t.id))
        metrics = rollout_metrics(trajectories, self.answers) | staleness(trajectories, self.version)
        token_limit, overlong = self.eval_env.limits.max_trajectory_tokens, self.config.overlong
        metrics |= overlong_metrics(trajectories, token_limit, overlong)
        batch = collate(trajectories, self.tokenizer.pad_token_id, self.classify, self.config.anchor_state)
        batch = shape_and_filter(batch, trajectories, token_limit, overlong)
        if usable := bool(batch.loss_mask.any()):
            try:
                with self.recorder.stage("log_probs"):
                    batch = self.score(batch)
                assert batch.began_log_probs is not None
                newest = sampled_by(self.version, trajectories, batch)
                self.check_mismatch(batch.began_log_probs, batch, newest, step)
                batch, prepared = prepare(batch, self.config)
                with self.recorder.stage("update"):
                    metrics |= prepared | self.update(batch, step) | batch_metrics(batch)
                assert batch.began_log_probs is not None
                metrics |= mismatch_metrics(batch.began_log_probs, batch)
            except (NonFiniteError, RayTaskError) as error:
                cause = getattr(error, "cause", error)  # what a worker raised
                if not isinstance(cause, NonFiniteError):
                    raise
                raise self.recorder.non_finite(step, cause, cause.trajectory_ids, trajectories) from error
        self.version = step
        with self.recorder.stage("broadcast"):
            (self.broadcast_to_vllm if usable else self.announce_version)()
        self.recorder.save_trajectories(step, trajectories)
        self.metrics, self.trajectories = metrics, trajectories
        return {}, step

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: Any = None
    ) -> None:
        """Evaluate, log, keep the best policy, save; OpenRLHF calls it after each step.

        Raises ``Ended``, ``Stopped``, or ``UserError`` if the tools are out.
        """
        recorder, step = self.recorder, global_step
        recorder.add_time("rollout", float((logs_dict or {}).get("timing/generation", 0.0)))
        metrics = self.metrics | recorder.evaluate_if_due(step, self.evaluate_policy)
        if recorder.record(step, metrics | tool_timings(self.trajectories), self.trajectories):
            recorder.save_best(step, self.save_policy)
        recorder.check_health(step, metrics, self.trajectories)
        stop = self.run_dir.stop_file.exists()
        self.unsaved = (step, {**(client_states or {}), "global_step": step})
        if stop or recorder.checkpoint_due(step):
            self.save()
        recorder.stop_if_lost()
        if recorder.ended:
            raise Ended
        if stop and step < self.config.update.steps:
            raise Stopped(f"stopped after step {step}")

    def save(self) -> None:
        """Write a checkpoint of the newest step, unless it has one, or the next one has begun to change weights."""
        if self.unsaved is None:
            return
        step, states = self.unsaved

        def save_shards(folder: Path) -> None:
            for name, group in {ACTOR: self.actor_model_group, CRITIC: self.critic_model_group}.items():
                if group is not None:
                    ray.get(group.async_run_method("save_state", folder=str(folder / name), states=states))

        state = {} if self.trust is None else {"trust": self.trust}
        self.recorder.save_checkpoint(step, self.save_policy, save_shards, state)
        self.unsaved = None

    def save_policy(self, folder: Path) -> None:
        """Have the workers write the policy as a transformers folder."""
        ray.get(self.actor_model_group.async_run_method("save_policy", folder=str(folder)))

    # -- the parts of a step --------------------------------------------------------------------------------------

    def score(self, batch: Batch) -> Batch:
        """Fill in old and reference log-probabilities and values.

        In a synchronous run the old log-probabilities are the trainer's own recomputation. An asynchronous batch is
        older than the trainer's weights, and the ratio has to measure that: its old log-probabilities are the
        sampler's, and those of the newest weights its ``start_log_probs``, which a trust region is around.
        """
        recomputed = self.score_with(self.actor_model_group, batch)
        behind = self.config.cluster.async_rollout
        fields = {"start_log_probs": recomputed} if behind else {}
        fields["old_log_probs"] = batch.rollout_log_probs if behind else recomputed
        if self.critic_model_group is not None:
            values = self.score_with(self.critic_model_group, batch)
            fields["values"] = values.masked_fill_(~batch.action_mask, 0.0)
        if self.reference_model_group is not None:
            fields["ref_log_probs"] = self.score_with(self.reference_model_group, batch)
        return with_scores(batch, fields)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimizer steps of one rollout batch, critic and actor; each rank takes its share of a mini-batch."""
        config, ranks = self.config, self.place.ranks
        by_mini = [by_rank(mini, ranks) for mini in mini_batches(batch, config, step)]
        shares: dict[str, list[Any]] = {"minis": [list(share) for share in zip(*by_mini, strict=True)]}
        shares["done"] = [(step - 1) * steps_of_batch(config.rollout.batch_size, config.update)] * ranks
        metrics: dict[str, float] = {}
        if self.critic_model_group is not None:
            metrics |= self.train_group(self.critic_model_group, **shares)[0]
        if step > config.critic_warmup_steps:
            sample = final_kl_sample(batch.loss_mask) if config.update.trust_kl is not None else []
            shares |= {"sample": by_rank(batch.rows(sample), ranks), "trust": [self.trust] * ranks}
            found, self.trust = self.train_group(self.actor_model_group, **shares)[0]
            metrics |= found
        return metrics

    def train_group(self, group: Any, **arguments: list[Any]) -> list[Any]:
        """``train_on`` with the optimizer's state on the GPU, where it is only for updates if models share the GPU."""
        sleeps = self.args.ds.enable_sleep
        if sleeps:
            ray.get(group.async_run_method(method_name="reload_states"))
        results = self.run_group(group, "train_on", **arguments)
        if sleeps:
            ray.get(group.async_run_method(method_name="offload_states"))
        return results

    def run_group(self, group: Any, method: str, **arguments: list[Any]) -> list[Any]:
        """Call ``method`` on each rank with the rank's item of each list; returns what the ranks return."""
        return [item for rank in ray.get(group.async_run_method_batch(method, **arguments)) for item in rank]

    def score_with(self, group: Any, batch: Batch) -> Tensor:
        """The (B, T) values that the ranks of a group compute, each for its share of the rows."""
        parts = self.run_group(group, "score", batch=by_rank(batch, self.place.ranks))
        return put_together(batch, rows_by_rank(batch, self.place.ranks), parts)

    def evaluate_policy(self, limit: int, search_off: bool = False) -> dict[str, float]:
        """``eval/`` metrics of the policy on at most ``limit`` questions, sampled as in the local engine."""
        temperature = self.config.eval.temperature
        kind = "search_off" if search_off else "eval"
        examples = len(self.eval_env.examples.examples)
        self.evaluator.eval_dataloader = evaluation_loader(self.config.seed, examples, limit, kind)
        # OpenRLHF samples this many at once, and waits for the longest of them before it goes on
        self.evaluator.args.rollout.batch_size = limit
        with self.recorder.stage("eval"):
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

    def init_checkpoint_states(self) -> dict[str, Any]:
        """OpenRLHF's own state in the loaded checkpoint; it calls this before anything is sampled.

        Raises ``UserError`` if the policy's workers did not load the checkpoint that the run was to go on from.
        """
        states: dict[str, Any] = super().init_checkpoint_states()  # type: ignore[misc]
        self.version = int(states.get("global_step", 0))
        if self.args.ckpt.load_enable and self.version != step_of(Path(self.args.ckpt.path)):
            raise UserError(
                f"OpenRLHF was to load {self.args.ckpt.path}, but it loaded the state of step {self.version}"
            )
        return states

    def announce_version(self) -> None:
        """Tell the vLLM engines the version of their weights: how many training steps were done on them.

        It is called while no engine samples (``trainers.Announcing``), or when the weights did not change.
        """
        batch_vllm_engine_call(self.vllm_engines, "set_policy_version", self.version)
