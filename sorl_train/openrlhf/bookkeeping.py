"""What a run on OpenRLHF writes down in each step: metrics, checkpoints, the best policy, trajectories, timings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import write_jsonl
from sorl_train.config.files import read_resolved
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.update import NonFiniteError
from sorl_train.models.shape import model_shape
from sorl_train.openrlhf import saves
from sorl_train.rollout.environments import make_env
from sorl_train.rollout.metrics import step_timings
from sorl_train.run.cards.policy import write_policy_card
from sorl_train.run.cards.trajectories import write_trajectory_card
from sorl_train.run.checkpoint import checkpoint_name
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import MetricsLog
from sorl_train.run.summary import Summary

MAX_LOST_STEPS = 3  # steps in a row without one usable trajectory before the run stops


class Bookkeeping:
    """The part of ``TrainStep`` that writes into the run's folder."""

    # of OpenRLHF's BasePPOTrainer
    args: Any
    actor_model_group: Any
    critic_model_group: Any
    # of TrainStep
    config: TrainConfig
    run_dir: RunDir
    version: int
    summary: Summary
    log: MetricsLog
    eval_env: ToolUseEnv
    trajectories: Sequence[Trajectory]
    timings: dict[str, float]
    begun: float

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics, and keep its policy if it is the best so far."""
        best = self.summary.observe(step, metrics)
        self.log.log(step, metrics)
        if best:
            folder = self.run_dir.checkpoints / "best"
            saves.write_whole(folder, step, lambda partial: self.write_policy(partial, best=True))
        if "eval/success" in metrics or self.is_saved(step):
            write_trajectory_card(self.run_dir, read_resolved(self.run_dir.config), self.eval_env.task)

    def save(self, step: int, states: dict[str, Any]) -> None:
        """All that a resume needs and the policy as a plain folder, together or not at all (see ``saves``)."""
        states |= {"global_step": step, "summary": self.summary.state()}

        def write(partial: Path) -> None:
            self.write_policy(partial, best=False)
            groups = {saves.ACTOR: self.actor_model_group, saves.CRITIC: self.critic_model_group}
            for name, group in groups.items():
                if group is not None:
                    ray.get(group.async_run_method("save_state", folder=str(partial / name), states=states))

        saves.write_whole(self.run_dir.checkpoints / checkpoint_name(step), step, write)
        saves.prune(self.run_dir.checkpoints, step, self.config.checkpoint.keep)

    def write_policy(self, folder: Path, *, best: bool) -> None:
        """The policy and its card, in ``folder/policy``."""
        policy = folder / saves.POLICY
        ray.get(self.actor_model_group.async_run_method("save_policy", folder=str(policy)))
        config = read_resolved(self.run_dir.config)
        write_policy_card(policy, self.run_dir, config, self.eval_env.task, self.version, best=best)

    def is_saved(self, step: int) -> bool:
        """Whether the step's trajectories are kept on disk."""
        every = self.config.rollout.save_every
        return step in (1, self.config.update.steps) or bool(every and step % every == 0)

    def save_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if self.is_saved(step):
            write_jsonl(self.run_dir.trajectories / f"step_{step:06d}.jsonl", trajectories)

    def dump_if_non_finite(self, error: Exception, trajectories: Sequence[Trajectory], step: int) -> None:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not isinstance(cause, NonFiniteError):
            return
        bad = set(cause.trajectory_ids)
        path = self.run_dir.path / f"non_finite_{step:06d}.jsonl"
        write_jsonl(path, sorted(trajectories, key=lambda t: t.id not in bad))
        raise UserError(
            f"step {step}: {cause}. The trajectories are in {path}; the last checkpoint is as it was. Lower "
            "optim.lr, or look at these trajectories."
        ) from error

    def why_lost(self) -> str:
        """As the local engine: a run whose tools are out for good would only burn time."""
        cause = next((t.error for t in self.trajectories if t.error), "unknown")
        return (
            f"every trajectory of {MAX_LOST_STEPS} steps in a row was excluded; the last error was: {cause}. "
            "Mend the tool or the task, then go on with --resume."
        )

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of a ``with`` block to a figure."""
        started = time.perf_counter()
        yield
        name = f"time/{name}_s"
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    def take_timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The step's wall-clock figures; starts the next step's."""
        stages, self.timings = self.timings, {}
        begun, self.begun = self.begun, time.perf_counter()
        overlap = self.config.cluster.async_rollout  # the next batch is sampled meanwhile
        return step_timings(stages, trajectories, self.begun - begun if overlap else None)

    def end(self) -> None:
        """Write the summary: its presence marks the run as finished."""
        config = self.config
        env = make_env(config)
        what = {"algo": config.algo, "task": env.task.name, "seed": config.seed, "steps": self.version}
        what["parameters"] = model_shape(self.args.actor.model_name_or_path).parameters
        sample = {"is_sample": env.examples.is_sample or self.eval_env.examples.is_sample}
        self.run_dir.write_summary(what | sample | self.summary.figures())
        self.log.close()
