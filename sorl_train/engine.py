"""The local engine: models, optimizers and environments on one machine, and the parts of a training step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_env.envs.prompts import check_prompts
from sorl_env.envs.text_env import TextEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutJob, RolloutSettings
from sorl_env.trajectory import Trajectory, write_jsonl
from sorl_env.trajectory.token_classes import TokenClassifier
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.advantages import batch_metrics
from sorl_train.learner.backend import Backend, TorchBackend
from sorl_train.learner.batch import Batch, Collected, collate, load_waiting, save_waiting
from sorl_train.learner.dapo import num_groups, shape_and_filter, with_signal
from sorl_train.learner.mismatch import check_mismatch, mismatch_limit
from sorl_train.learner.optimizer_step import Means, NonFiniteError, adamw, load_optimizers, save_optimizers
from sorl_train.learner.replay import Mixed, ReplayBuffer
from sorl_train.learner.scoring import score, token_records, with_scores
from sorl_train.learner.trust_region import final_kl_sample
from sorl_train.learner.update import CriticUpdate, PolicyUpdate
from sorl_train.learner.update_settings import is_on_policy, mini_batches, steps_of_batch
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import (
    VALUE_HEAD_FILE,
    load_adapters,
    load_critic,
    load_policy,
    load_tokenizer,
    save_policy,
)
from sorl_train.rollout.environments import make_env, without_tools
from sorl_train.rollout.jobs import LocalSampler, evaluation_jobs, further_jobs, run_jobs, training_jobs
from sorl_train.rollout.metrics import answers_of, eval_metrics, is_success, search_off_metrics
from sorl_train.rollout.model_check import check_critic, check_policy, try_packing, try_packing_critic
from sorl_train.rollout.sampler import TransformersSampler
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import write_token_records
from sorl_train.run.recorder import Recorder


class LocalEngine:
    """Everything that a run holds, and the parts of a training step, which ``train_rl.train`` puts in order."""

    def __init__(self, config: TrainConfig, run_dir: RunDir, display: Display, model_folder: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.model_folder = model_folder
        self.tokenizer = load_tokenizer(model_folder)
        self.classify = TokenClassifier(self.tokenizer)
        self.env = make_env(config)
        self.eval_env = make_env(config, evaluation=True)
        # supervised training counts those of its demonstrations (``load_demos``)
        asked = [self.env, self.eval_env] if config.stage == "rl" else [self.eval_env]
        template = config.chat_template
        check_prompts(asked, self.tokenizer, use_chat_template=template, tell=display.message)
        self.answers = answers_of(self.env.examples.examples)
        self.recorder = Recorder(config, run_dir, self.env.task, display)
        self.step = 0  # training steps done
        self.waiting: deque[Collected] = deque()  # batches to train on, oldest first
        self.replay = ReplayBuffer(config.replay, is_success)
        # the batch of the last update, with log-probabilities and entropies by trajectory, if this step is saved
        self.last_update_stats: tuple[Batch, dict[str, tuple[Tensor, Tensor]]] | None = None

    def load(self, folder: Path | None) -> None:
        """Load models and optimizers from a checkpoint, or from the model folder if there is none."""
        config, hardware = self.config, self.config.hardware
        torch.manual_seed(config.seed)
        source = str(folder / "policy") if folder else self.model_folder
        self.device = pick_device(hardware.device)
        loading: Any = {
            "device": hardware.device,
            "gradient_checkpointing": hardware.gradient_checkpointing,
        }
        self.policy = load_policy(
            self.model_folder if config.lora.rank else source, lora=config.lora, **loading
        )
        if folder and config.lora.rank:
            load_adapters(self.policy, folder / "policy")
        sampler = config.sampler
        if sampler.backend == "vllm":
            from sorl_train.rollout.vllm_sampler import VllmSampler

            self.sampler: LocalSampler = VllmSampler(
                self.policy, self.model_folder, self.longest, sampler, dtype=hardware.dtype, seed=config.seed
            )
        else:
            self.sampler = TransformersSampler(
                self.policy, self.tokenizer, sampler.max_concurrency, hardware.dtype
            )
        optimizer = adamw(self.policy, config.optim, config.optim.lr)
        how: Any = {"dtype": hardware.dtype, "temperature": sampler.temperature}
        self.policy_update = PolicyUpdate(TorchBackend(self.policy, optimizer, **how), config)
        self.optimizers = {"actor": optimizer}
        self.critic_update: CriticUpdate | None = None
        is_rl = config.stage == "rl"  # supervised training needs the policy alone
        if is_rl and config.algorithm.needs_critic:
            critic = load_critic(str(folder / "critic") if folder else config.critic or source, **loading)
            if config.critic and not folder:
                rows = len(critic.backbone.get_input_embeddings().weight)
                self._require_own_tokens("critic", config.critic, rows)
            self.optimizers["critic"] = adamw(critic, config.optim, config.optim.critic_lr)
            self.critic_update = CriticUpdate(TorchBackend(critic, self.optimizers["critic"], **how), config)
        self.reference = self._load_reference(loading, how) if is_rl and config.loss.kl_coef > 0 else None
        self.check_mismatch = partial(
            check_mismatch,
            limit=mismatch_limit(
                sampler, compute_dtype(hardware.dtype, self.device), served=sampler.backend == "vllm"
            ),
            top_p=sampler.top_p,
            decode=self.tokenizer.decode,
            folder=self.run_dir.path,
        )
        self._check_models()
        if folder:
            self.replay.load(folder)
            load_optimizers(folder / "optimizer.safetensors", self.optimizers)
            self.waiting.extend(load_waiting(folder, self.collate))
            state = self.recorder.restore(folder)
            self.step = state["step"]
            if self.policy_update.trust is not None and "trust" in state:  # older versions have none
                self.policy_update.trust.load_state_dict(state["trust"])

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that the limits allow."""
        return max(env.limits.max_trajectory_tokens for env in (self.env, self.eval_env))

    def _load_reference(self, loading: Any, how: Any) -> TorchBackend:
        """The model of the KL term: the policy's start, or a teacher of the same family."""
        teacher = self.config.loss.kl_model
        if teacher:
            self._require_own_tokens("loss.kl_model", teacher)
        reference = load_policy(teacher or self.model_folder, **loading)
        return TorchBackend(reference.requires_grad_(False).eval(), **how)

    def _require_own_tokens(self, setting: str, source: str, rows: int = 0) -> None:
        """Refuse a model with other tokens than the policy's. A critic of ours has no tokenizer, but ``rows`` of
        embeddings."""
        if (Path(source) / VALUE_HEAD_FILE).is_file():
            fits = rows >= len(self.tokenizer)
        else:
            fits = load_tokenizer(source).get_vocab() == self.tokenizer.get_vocab()
        if not fits:
            raise UserError(
                f"{setting} {source} has another tokenizer than {self.model_folder}, so it cannot score this policy's "
                "tokens: choose a model of the same family"
            )

    def _check_models(self) -> None:
        """Refuse models whose log-probabilities differ between our sampler or packed training pass and their plain
        ``forward``."""
        sampled = self.config.sampler.backend == "transformers"
        check_policy(self.policy, self.longest, sampled=sampled, trained=True)
        if why := try_packing(self.policy, self.longest, sampled=sampled):
            self.recorder.display.message(
                f"padding is computed, too, because this model's rows cannot be packed: {why}"
            )
        if self.reference is not None:
            check_policy(self.reference.model, self.longest, sampled=False, trained=False)
            try_packing(self.reference.model, self.longest)
        if self.critic_update is not None:
            check_critic(self.critic_update.backend.model, self.longest)
            try_packing_critic(self.critic_update.backend.model, self.longest)

    # -- the parts of a step, in the order of ``train`` -----------------------------------------------------------

    def collect(self, step: int) -> Collected:
        """Sample a rollout batch with the newest weights, and score it with them."""
        trajectories, usable = self._draw(step)
        if usable is None:
            return Collected(trajectories, None)
        with self.recorder.stage("log_probs"), stop_on_non_finite(self.recorder, step, trajectories):
            batch = self.score(usable)
        if batch.old_log_probs is not None:  # otherwise ``update`` is the first to compute them
            self.check_mismatch(batch.old_log_probs, batch, batch.loss_mask, step)
        return Collected(trajectories, batch)

    def _draw(self, step: int) -> tuple[list[Trajectory], Batch | None]:
        """The step's trajectories and what ``usable`` makes of them, after as many rounds as dynamic sampling needs.

        Further rounds end when no group is missing, when the examples run out, and after a round of which more than
        half was excluded: then a tool is out.
        """
        rollout, examples = self.config.rollout, len(self.env.examples.examples)
        jobs, visited = training_jobs(rollout, self.config.seed, examples, step), set[int]()
        trajectories: list[Trajectory] = []
        for number in range(1, rollout.dynamic_sampling + 2):
            newest = self._run("rollout", self.env, jobs, self.config.sampler.temperature)
            trajectories += newest
            usable = self.usable(trajectories)
            missing = rollout.batch_size // rollout.group_size - num_groups(usable)
            is_out = 2 * sum(t.excluded for t in newest) > len(newest)
            if number > rollout.dynamic_sampling or not missing or is_out:
                break
            visited |= {job.example_index for job in jobs}
            jobs = further_jobs(rollout, self.config.seed, examples, step, number, visited, missing)
            if not jobs:
                break
        return trajectories, usable

    def _run(
        self, stage: str, env: TextEnv, jobs: Sequence[RolloutJob], temperature: float
    ) -> list[Trajectory]:
        self.sampler.policy_version = self.step
        settings = RolloutSettings(
            temperature=temperature,
            top_p=self.config.sampler.top_p if temperature else 1.0,
            use_chat_template=self.config.chat_template,
            max_concurrency=self.config.sampler.max_concurrency,
        )
        with self.recorder.stage(stage, len(jobs)) as advance:
            return run_jobs(env, self.tokenizer, self.sampler, jobs, settings, lambda _: advance(1))

    def usable(self, trajectories: list[Trajectory]) -> Batch | None:
        """Tensors of the trajectories to train on: without excluded ones, and with dynamic sampling without groups of
        equal rewards."""
        kept = [t for t in trajectories if not t.excluded]  # no other reaches a loss or a group's baseline
        batch = self.collate(kept) if kept else None
        if batch is not None and self.config.rollout.dynamic_sampling:
            batch = with_signal(batch)
        return batch if batch is not None and len(batch) else None

    def collate(self, trajectories: list[Trajectory]) -> Batch:
        """The trajectories as tensors, with the learner's rewards, which are not scored yet."""
        batch = collate(trajectories, self.tokenizer.pad_token_id, self.classify, self.config.anchor_state)
        return shape_and_filter(batch, trajectories, self.token_limit, self.config.overlong)

    @property
    def token_limit(self) -> int:
        """Tokens of the longest trajectory that training allows."""
        return self.env.limits.max_trajectory_tokens

    @property
    def on_policy(self) -> bool:
        """See ``is_on_policy``."""
        return is_on_policy(self.config, self.step)

    def score(self, batch: Batch) -> Batch:
        """Fill in old (unless ``on_policy``) and reference log-probabilities and values."""
        self.policy.eval()
        backends: dict[str, Backend] = {} if self.on_policy else {"old_log_probs": self.policy_update.backend}
        if self.reference is not None:
            backends["ref_log_probs"] = self.reference
        if self.critic_update is not None:
            backends["values"] = self.critic_update.backend
            self.critic_update.backend.model.eval()
        return with_scores(batch, score(batch, backends, self.config.update.log_prob_micro_batch_size))

    def mix(self, collected: Collected) -> Mixed:
        """What to train on: the collected batch, and past trajectories of the same questions if replay is on."""
        return self.replay.step(collected, self.step, self.collate)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimizer steps on one rollout batch; returns ``loss/`` metrics."""
        config, means = self.config, Means()
        past_warmup = step > config.critic_warmup_steps
        if past_warmup:
            batch = self._with_start(batch)
        minis = list(mini_batches(batch, config, step))
        done = (step - 1) * steps_of_batch(config.rollout.batch_size, config.update)
        seen: dict[str, tuple[Tensor, Tensor]] = {}  # by trajectory: its last log-probabilities and entropies
        critic = self.critic_update
        with self.recorder.stage("update", len(minis) * (past_warmup + (critic is not None))) as advance:
            if critic is not None:
                critic.backend.model.train()
                for _ in critic.steps(minis, done, means):
                    advance(1)
            if past_warmup:
                self.policy.train()  # without it gradient checkpointing is off
                for mini, log_probs, entropies in self.policy_update.steps(minis, done, means):
                    if self.recorder.is_saved(step):
                        seen |= zip(mini.ids, zip(log_probs, entropies, strict=True), strict=True)
                    if self.on_policy:
                        batch = mini.with_fields(old_log_probs=log_probs)
                        self.check_mismatch(log_probs, batch, batch.loss_mask, step)
                    advance(1)
                self.policy_update.end_batch(batch.rows(final_kl_sample(batch.loss_mask)), means)
        self.last_update_stats = (batch, seen) if seen else None
        return means.result() | batch_metrics(batch)

    def _with_start(self, batch: Batch) -> Batch:
        """Add the log-probabilities that ``update.trust_kl`` and ``update.target_kl`` measure from, if older weights
        sampled part of the batch."""
        is_older = self.config.rollout.max_staleness > 0 or batch.replayed is not None
        update = self.config.update
        if not is_older or (update.trust_kl is None and update.target_kl is None):
            return batch
        self.policy.eval()
        backends = {"start_log_probs": self.policy_update.backend}
        return with_scores(batch, score(batch, backends, update.log_prob_micro_batch_size))

    def evaluate(self, limit: int, search_off: bool = False) -> dict[str, float]:
        """``eval/`` metrics of the policy on at most ``limit`` questions of the evaluation split."""
        env = without_tools(self.eval_env) if search_off else self.eval_env
        jobs = evaluation_jobs(self.config.seed, len(env.examples.examples), limit)
        trajectories = self._run("eval", env, jobs, self.config.eval.temperature)
        if search_off:
            return search_off_metrics(trajectories)
        write_jsonl(self.run_dir.trajectories / f"eval_{self.step:06d}.jsonl", trajectories)
        return eval_metrics(trajectories)

    # -- what is kept ---------------------------------------------------------------------------------------------

    def save_trajectories(self, step: int, trajectories: list[Trajectory]) -> None:
        """Write the step's trajectories, if they are to be kept, and the loss's figures for each of their tokens."""
        if self.last_update_stats is not None:
            batch, seen = self.last_update_stats
            texts = {t.id: self.classify.texts(t) for t in trajectories if t.id in seen}
            seen = {name: found for name, found in seen.items() if name in texts}  # without replayed ones
            records = token_records(batch, seen, self.policy_update.loss_settings, texts)
            write_token_records(self.run_dir.trajectories / f"step_{step:06d}.tokens.jsonl.gz", records)
            self.last_update_stats = None
        self.recorder.save_trajectories(step, trajectories)

    def save(self) -> None:
        """Write a checkpoint of the current step."""
        trust = self.policy_update.trust
        state = {} if trust is None else {"trust": trust.state_dict()}
        self.recorder.save_checkpoint(self.step, self._save_policy, self._save_rest, state)

    def save_best(self) -> None:
        """Keep the current policy as the best one."""
        self.recorder.save_best(self.step, self._save_policy)

    def _save_policy(self, folder: Path) -> None:
        save_policy(self.policy, self.tokenizer, folder)

    def _save_rest(self, folder: Path) -> None:
        if self.critic_update is not None:
            self.critic_update.backend.model.save(folder / "critic")
        save_optimizers(folder / "optimizer.safetensors", self.optimizers)
        save_waiting(folder, self.waiting)
        self.replay.save(folder)

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy."""
        return sum(p.numel() for p in self.policy.parameters())


@contextmanager
def stop_on_non_finite(recorder: Recorder, step: int, trajectories: list[Trajectory]) -> Iterator[None]:
    """End the run if something in the block is not finite, and write the trajectories to a file."""
    try:
        yield
    except NonFiniteError as error:
        raise recorder.non_finite(step, error, error.trajectory_ids, trajectories) from error
