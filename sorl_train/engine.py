"""What the local engine is made of: models, optimizers, environments, and the parts of one training step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_env.token_classes import TokenClassifier
from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import write_jsonl
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.mismatch import check_mismatch, mismatch_limit
from sorl_train.learner.schedule import learning_rate, mini_batches, steps_of_batch
from sorl_train.learner.scored_batch import batch_metrics
from sorl_train.learner.scoring import score
from sorl_train.learner.settings import update_settings
from sorl_train.learner.state import Collected, load_state, write_state
from sorl_train.learner.token_records import token_records
from sorl_train.learner.update import CriticUpdate, Means, NonFiniteError, PolicyUpdate, past_target_kl
from sorl_train.models.critic import load_critic
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import load_adapters, load_policy, load_tokenizer, save_policy
from sorl_train.rollout.environments import answers_of, make_env, without_tools
from sorl_train.rollout.jobs import LocalSampler, evaluation_jobs, run_jobs, training_jobs
from sorl_train.rollout.metrics import eval_metrics, search_off_metrics, step_timings
from sorl_train.rollout.model_check import check_critic, check_policy
from sorl_train.rollout.sampler import TransformersSampler
from sorl_train.run import checkpoint
from sorl_train.run.alarm import alarm_so_far
from sorl_train.run.cards.policy import write_policy_card
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.run.hashed_folder import write_folder
from sorl_train.run.log_lengths import log_lengths
from sorl_train.run.summary import Summary
from sorl_train.run.token_stats import write_token_records


class LocalEngine:
    """Everything a run holds, and the parts of a training step; ``trainer.train`` puts them in order."""

    def __init__(self, config: TrainConfig, run_dir: RunDir, display: Display, model_folder: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.display = display
        self.model_folder = model_folder
        self.tokenizer = load_tokenizer(model_folder)
        self.classify = TokenClassifier(self.tokenizer)
        self.env = make_env(config)
        self.eval_env = make_env(config, evaluation=True)
        self.answers = answers_of(self.env.examples.examples)
        self.step = 0  # training steps done
        self.lost_steps = 0  # newest steps in a row without one usable trajectory
        self.run_id = run_dir.run_id
        self.waiting: deque[Collected] = deque()
        self.lr_scale = 1.0  # falls with each roll-back
        self.visited: tuple[Batch, dict[str, tuple[Tensor, Tensor]]] | None = None  # of a step to be saved
        self.ended = ""  # why the run ends before its last step
        self.summary = Summary()
        self.timings: dict[str, float] = {}

    def load(self, folder: Path | None) -> None:
        """Models and optimizers, from a checkpoint or from the model folder."""
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
        if not hasattr(self, "sampler"):  # a second vLLM would want its share of the GPU once more
            self.sampler: LocalSampler = self._make_sampler()
        self.sampler.model = self.policy  # after a roll-back, another one
        optimizer = self._adamw([p for p in self.policy.parameters() if p.requires_grad], config.optim.lr)
        settings = update_settings(config)
        self.policy_update = PolicyUpdate(self.policy, optimizer, settings)
        self.optimizers = {"actor": optimizer}
        self.critic_update: CriticUpdate | None = None
        if config.algorithm.needs_critic:
            critic = load_critic(str(folder / "critic") if folder else config.critic or source, **loading)
            self.optimizers["critic"] = self._adamw(list(critic.parameters()), config.optim.critic_lr)
            self.critic_update = CriticUpdate(critic, self.optimizers["critic"], settings)
        self.reference = None
        if config.loss.kl_coef > 0:
            self.reference = load_policy(self.model_folder, **loading)
            self.reference.requires_grad_(False).eval()
        self._check_models()
        self.waiting.clear()
        if folder:
            self._load_state(folder)
        self.alarm = alarm_so_far(config.alarm, self.run_dir, self.step)

    def _make_sampler(self) -> LocalSampler:
        config = self.config
        if config.sampler.backend == "vllm":
            from sorl_train.rollout.vllm_sampler import VllmSampler

            return VllmSampler(self.policy, self.model_folder, self.longest, config)
        return TransformersSampler(
            self.policy, self.tokenizer, config.sampler.max_concurrency, config.hardware.dtype
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory there may be."""
        return max(env.limits.max_trajectory_tokens for env in (self.env, self.eval_env))

    def _check_models(self) -> None:
        """Refuse models that would be sampled or trained otherwise than they compute themselves."""
        sampled = self.config.sampler.backend == "transformers"
        check_policy(self.policy, self.longest, sampled=sampled, trained=self.config.stage == "rl")
        if self.reference is not None:
            check_policy(self.reference, self.longest, sampled=False, trained=False)
        if self.critic_update is not None:
            check_critic(self.critic_update.critic, self.longest)

    def _adamw(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        optim = self.config.optim
        return torch.optim.AdamW(
            parameters,
            lr=lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    # -- one step's parts, in the order of ``train`` --------------------------------------------------------------

    def collect(self, step: int) -> Collected:
        """Sample a rollout batch with the newest weights, and score it with them."""
        jobs = training_jobs(self.config, len(self.env.examples.examples), step)
        self.sampler.policy_version = self.step
        with self._stage("rollout", len(jobs)) as advance:
            trajectories = run_jobs(
                self.env,
                self.tokenizer,
                self.sampler,
                jobs,
                self.config,
                temperature=self.config.sampler.temperature,
                on_finish=lambda _: advance(1),
            )
        with self._stage("log_probs", 1):
            batch = self._batch(trajectories)
        if batch is not None and batch.old_log_probs is not None:  # otherwise ``update`` sees them first
            self.check_mismatch(batch, step)
        return Collected(trajectories, batch)

    def _batch(self, trajectories: list[Trajectory]) -> Batch | None:
        usable = [
            t for t in trajectories if not t.excluded
        ]  # nothing else reaches a loss or a group baseline
        return self.score(self.collate(usable)) if usable else None

    def collate(self, trajectories: list[Trajectory]) -> Batch:
        """Their tensors, to be scored."""
        return collate(trajectories, self.tokenizer.pad_token_id, self.classify)

    @property
    def checkpoint_due(self) -> bool:
        """Whether the run is to be saved after the step just done."""
        every = self.config.checkpoint.every
        last = bool(self.ended) or self.step == self.config.update.steps
        return last or (every > 0 and self.step % every == 0)

    @property
    def on_policy(self) -> bool:
        """Every trajectory is trained on once, in one step, by the weights that sampled it: the old log-probabilities
        are those of the step itself, and need no pass before it."""
        update, loss = self.config.update, self.config.loss
        if self.step < update.critic_warmup_steps:  # there is no such step
            return False
        one_step = update.epochs == 1 and update.mini_batch_size >= self.config.rollout.batch_size
        in_reward = loss.kl_coef > 0 and loss.kl_in == "reward"  # takes old log-probabilities before the step
        return one_step and self.config.rollout.max_staleness == 0 and not in_reward

    def score(self, batch: Batch) -> Batch:
        """Fill in old (unless ``on_policy``) and reference log-probabilities and values."""
        self.policy.eval()
        critic = None if self.critic_update is None else self.critic_update.critic
        if critic is not None:
            critic.eval()
        models = {} if self.on_policy else {"old_log_probs": self.policy}
        if self.reference is not None:
            models["ref_log_probs"] = self.reference
        return score(batch, models, critic, self.config, self.device)

    def check_mismatch(self, batch: Batch, step: int) -> None:
        """End the run if the weights that sampled ``batch`` now say something else of it than the sampler did."""
        assert batch.old_log_probs is not None
        check_mismatch(
            batch.old_log_probs,
            batch,
            batch.loss_mask,
            limit=mismatch_limit(self.config, compute_dtype(self.config.hardware.dtype, self.device)),
            decode=self.tokenizer.decode,
            path=self.run_dir.path / f"mismatch_{step:06d}.jsonl",
            step=step,
        )

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """All optimizer steps of one rollout batch."""
        config, means = self.config, Means()
        batches = list(mini_batches(batch, config, step))
        per_step = steps_of_batch(config)
        total = per_step * config.update.steps
        optim = config.optim
        train_policy = step > config.update.critic_warmup_steps
        seen: dict[str, tuple[Tensor, Tensor]] = {}  # log-probabilities and entropies at the last visit
        self.policy.train()  # without it gradient checkpointing is off
        if self.critic_update is not None:
            self.critic_update.critic.train()
        with self._stage("update", len(batches)) as advance:
            for number, mini in enumerate(batches):
                done = (step - 1) * per_step + number
                if self.critic_update is not None:
                    lr = learning_rate(optim, optim.critic_lr, optim.critic_warmup_ratio, done, total)
                    self.critic_update.step(mini, lr * self.lr_scale, means)
                if train_policy:
                    lr = learning_rate(optim, optim.lr, optim.warmup_ratio, done, total)
                    log_probs, entropies = self.policy_update.step(mini, lr * self.lr_scale, means)
                    if self.is_saved(step):
                        seen |= zip(mini.ids, zip(log_probs, entropies, strict=True), strict=True)
                    if self.on_policy:
                        batch = mini.with_fields(old_log_probs=log_probs)
                        self.check_mismatch(batch, step)
                    train_policy = not past_target_kl(config.update.target_kl, means)
                advance(1)
        self.visited = (batch, seen) if seen else None
        return means.result() | batch_metrics(batch)

    def evaluate(self, step: int, limit: int, *, search_off: bool = False) -> dict[str, float]:
        """Greedy success on the evaluation split."""
        env = without_tools(self.eval_env) if search_off else self.eval_env
        jobs = evaluation_jobs(self.config, len(env.examples.examples), limit)
        with self._stage("eval", len(jobs)) as advance:
            trajectories = run_jobs(
                env,
                self.tokenizer,
                self.sampler,
                jobs,
                self.config,
                temperature=self.config.eval.temperature,
                on_finish=lambda _: advance(1),
            )
        if search_off:
            return search_off_metrics(trajectories)
        write_jsonl(self.run_dir.trajectories / f"eval_{step:06d}.jsonl", trajectories)
        return eval_metrics(trajectories)

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[Any]:
        started = time.perf_counter()
        with self.display.stage(name, total) as advance:
            yield advance
        key = f"time/{name}_s"
        self.timings[key] = self.timings.get(key, 0.0) + time.perf_counter() - started

    def take_timings(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """The step's wall-clock figures; starts the next step's."""
        stages, self.timings = self.timings, {}
        return step_timings(stages, trajectories)

    def is_saved(self, step: int) -> bool:
        """Whether the step's trajectories are kept on disk."""
        every = self.config.rollout.save_every
        return step in (1, self.config.update.steps) or bool(every and step % every == 0)

    def save_trajectories(self, step: int, trajectories: list[Trajectory]) -> None:
        if not self.is_saved(step):
            return
        if self.visited is not None:
            batch, seen = self.visited
            texts = {t.id: self.classify.texts(t) for t in trajectories if t.id in seen}
            records = token_records(batch, seen, self.policy_update.settings.loss, texts)
            write_token_records(self.run_dir.trajectories / f"step_{step:06d}.tokens.jsonl.gz", records)
            self.visited = None
        write_jsonl(self.run_dir.trajectories / f"step_{step:06d}.jsonl", trajectories)

    def save(self) -> Path:
        """Write a checkpoint of the current step, atomically."""
        folder = self.run_dir.checkpoints / checkpoint.checkpoint_name(self.step)
        write_folder(folder, self._write_checkpoint, self.run_id)
        checkpoint.prune_checkpoints(self.run_dir.checkpoints, self.config.checkpoint.keep)
        return folder

    def save_best(self) -> Path:
        """Keep the current policy as the best one; only its weights, training goes on from the newest."""
        best = self.run_dir.checkpoints / "best"
        return write_folder(best, lambda folder: self._write_policy(folder, best=True), self.run_id)

    def _write_policy(self, folder: Path, *, best: bool) -> None:
        """The policy's weights and tokenizer as ``folder/policy``, with its card."""
        policy, is_sft = folder / "policy", self.config.stage == "sft"
        save_policy(self.policy, self.tokenizer, policy)
        step = self.config.sft.steps if is_sft else self.step
        write_policy_card(policy, self.run_dir, self.config, self.env.task, step, best=best and not is_sft)

    def _write_checkpoint(self, folder: Path) -> None:
        self._write_policy(folder, best=False)
        if self.critic_update is not None:
            self.critic_update.critic.save(folder / "critic")  # type: ignore[operator]
        counters: dict[str, Any] = {
            "step": self.step,
            "lr_scale": self.lr_scale,
            "lost_steps": self.lost_steps,
        }
        counters |= {"summary": self.summary.state(), "logs": log_lengths(self.run_dir)}
        write_state(folder, self.optimizers, self.waiting, counters)

    def _load_state(self, folder: Path) -> None:
        counters, waiting = load_state(folder, self.optimizers, self.collate)
        self.step, self.lr_scale = counters["step"], counters["lr_scale"]
        self.lost_steps = counters["lost_steps"]
        self.summary = Summary.from_state(counters["summary"])
        self.waiting.extend(waiting)

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy."""
        return sum(p.numel() for p in self.policy.parameters())

    def summarize(self) -> dict[str, Any]:
        """The run's figures and what they are figures of."""
        config = self.config
        what = {"algo": config.algo, "task": self.env.task.name, "seed": config.seed, "steps": self.step}
        sample = {"is_sample": self.env.examples.is_sample or self.eval_env.examples.is_sample}
        return what | {"parameters": self.num_parameters} | sample | self.summary.figures()

    def dump_non_finite(self, error: NonFiniteError, trajectories: list[Trajectory]) -> Path:
        """Write the trajectories that were being trained on, those named by the error first."""
        bad = set(error.trajectory_ids)
        ordered = sorted(trajectories, key=lambda t: t.id not in bad)
        path = self.run_dir.path / f"non_finite_{self.step + 1:06d}.jsonl"
        write_jsonl(path, ordered)
        return path
