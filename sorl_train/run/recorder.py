"""What a run writes down after each step, and what it decides from it: the same for both engines.

An engine samples and trains; its ``Recorder`` logs the metrics, keeps the best figures and policy, watches for a
collapse, and says when to evaluate and to save. Only the engine knows how weights are written, so it hands over the
functions that write them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.task import Task
from sorl_env.trajectory import Trajectory, write_jsonl
from sorl_train.config.find_algorithm import find_algorithm
from sorl_train.config.settings import TrainConfig
from sorl_train.run.alarm import ALARM, CollapseAlarm
from sorl_train.run.cards import write_policy_card
from sorl_train.run.checkpoint import (
    STATE,
    atomic_folder,
    checkpoint_name,
    list_checkpoints,
    log_lengths,
    prune_checkpoints,
    saved_best,
)
from sorl_train.run.display import Advance, Display, Diverged
from sorl_train.run.files import read_jsonl, read_own_json
from sorl_train.run.folder import NON_FINITE, RunDir
from sorl_train.run.metrics_log import MetricsLog
from sorl_train.run.stability import IN_VAIN, Summary, in_vain, off_policy_words, step_events

ENDED = "ended"  # the kind of the event of a run that ends before its last step
MAX_LOST_STEPS = 3  # steps in a row without one usable trajectory before the run stops

Writer = Callable[[Path], None]  # writes weights into a folder
# number of questions, whether searches find nothing -> metrics
Evaluate = Callable[[int, bool], dict[str, float]]


class Recorder:
    """Records one run. A policy's card describes its ``task``; ``hash_up_to`` is that of ``atomic_folder``. ``ended``
    says why the run ends before its last step, and is empty while it goes on."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: RunDir,
        task: Task,
        display: Display,
        hash_up_to: int | None = None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.task = task
        self.display = display
        self.ended = ""
        self._run_id = run_dir.run_id
        self._hash_up_to = hash_up_to
        self._summary = Summary()
        self._alarm = CollapseAlarm(config.alarm)
        self._lost_steps = 0  # newest steps in a row without one usable trajectory
        self._some_lost = False  # whether the newest step lost some
        self._in_vain = 0  # steps so far that taught nothing
        self._failure = ""  # why the run ends with an error
        log = config.log
        self._log = MetricsLog(run_dir, tensorboard=log.tensorboard, wandb=log.wandb, trackio=log.trackio)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of the stages of the step in progress
        self._last_record: float | None = None

    # -- figures --------------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str, total: int = 1) -> Iterator[Advance]:
        """Show a part of a step, of ``total`` units, and add the time it takes to ``time/NAME_s``."""
        started = time.perf_counter()
        with self.display.stage(name, total) as advance:
            yield advance
        self.add_time(name, time.perf_counter() - started)

    def add_time(self, name: str, seconds: float) -> None:
        """Add to the seconds that the step in progress spent in a stage."""
        self._seconds[f"time/{name}_s"] += seconds

    def record(
        self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory] = ()
    ) -> bool:
        """``log`` the metrics of a step that was trained on ``trajectories``, with its timings."""
        return self.log(step, {**metrics, **self._timings(trajectories)})

    def log(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Log and show metrics. True if the step's evaluation is the best so far."""
        self._log.log(step, metrics)
        is_best = self._summary.observe(step, metrics)
        self.display.step(step, metrics)
        return is_best

    def _timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The step's stages, its whole time, and the tokens sampled a second; starts the next step's."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        begun, self._last_record = self._last_record, time.perf_counter()
        # loading the models is not part of the first step of a process
        step_s = sum(seconds.values()) if begun is None else self._last_record - begun
        tokens = sum(t.num_action_tokens for t in trajectories)
        return seconds | {
            "time/step_s": step_s,
            "time/tokens_per_s": tokens / max(step_s, 1e-9),
            "time/rollout_tokens_per_s": tokens / max(seconds.get("time/rollout_s", 0.0), 1e-9),
        }

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the summary: ``facts`` and the run's figures. Its file marks the run as finished."""
        config = self.config
        method = {"algo": config.algo} if config.stage == "rl" else {"stage": config.stage}
        summary = {**method, "task": self.task.name, "seed": config.seed, **facts, **self._summary.figures()}
        row = find_algorithm(config.algo)
        lines = read_jsonl(self.run_dir.metrics)
        clips = row.surrogate_name in ("clipped", "cispo")
        summary["off_policy"] = off_policy_words(lines, normalizes=row.normalize, clips=clips) or None
        prune_checkpoints(self.run_dir.checkpoints, config.checkpoint.keep)  # unless a kill has come between
        self.run_dir.write_summary(summary)
        return summary

    def close(self) -> None:
        """Finish the logs."""
        self._log.close()

    # -- what is due ----------------------------------------------------------------------------------------------

    def is_saved(self, step: int) -> bool:
        """Whether the step's trajectories are kept on disk."""
        return step in (1, self.config.update.steps) or _is_due(step, self.config.rollout.save_every)

    def save_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write the trajectories of a step to disk if they are to be kept."""
        if self.is_saved(step):
            write_jsonl(self.run_dir.trajectories / f"step_{step:06d}.jsonl", trajectories)

    def evaluate_if_due(self, step: int, evaluate: Evaluate) -> dict[str, float]:
        """Metrics of the evaluation after ``step``: the full one after the last step, else one each ``eval.every``."""
        settings = self.config.eval
        if step < self.config.update.steps:
            return evaluate(settings.num_examples, False) if _is_due(step, settings.every) else {}
        metrics = evaluate(settings.num_examples_final, False)
        return metrics | (evaluate(settings.num_examples_final, True) if settings.search_off else {})

    def checkpoint_due(self, step: int) -> bool:
        """Whether to write a checkpoint after ``step``: also when the run ends after it."""
        is_last = bool(self.ended or self._failure) or step == self.config.update.steps
        return is_last or _is_due(step, self.config.checkpoint.every)

    # -- what ends a run ------------------------------------------------------------------------------------------

    def check_health(
        self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]
    ) -> None:
        """Check for a collapse, for early signs of one, and for tools that fail; set ``ended`` as configured."""
        self._count_lost(step, trajectories)
        for kind, reason, is_told in step_events(metrics, self.config.rollout.dynamic_sampling):
            if kind == IN_VAIN:  # the first such batch is told, the second, the fourth, the eighth, ..
                if self.config.loss.kl_in == "alone":
                    continue  # no token has an advantage, and every token learns from the teacher
                self._in_vain += 1
                if self._in_vain & (self._in_vain - 1):
                    continue
            self.run_dir.append_event(step, kind, reason)
            if is_told:
                self.display.message(f"step {step}: {reason}")
        alarm, action = self._alarm.observe(step, metrics), self.config.alarm.action
        if alarm is not None:
            told = {"action": action, "signals": alarm.signals_or_null()}
            self.run_dir.append_event(alarm.step, ALARM, alarm.reason, **told)
            self.display.message(f"collapse alarm in step {alarm.step}: {alarm.reason}")
            if action == "stop":
                self._end(step, f"ended by the collapse alarm after step {step} (alarm.action=stop)")
        if not self.ended and 0 < self.config.eval.patience <= self._summary.evaluations_below:
            self._end(step, self._summary.out_of_patience())

    def _end(self, step: int, why: str) -> None:
        self.ended = why
        self.run_dir.append_event(step, ENDED, why)

    def _count_lost(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        if not all(t.excluded for t in trajectories):
            self._lost_steps = 0
            lost = [t.error for t in trajectories if t.excluded and t.error]
            if lost and not self._some_lost:
                said = f"{len(lost)} of {len(trajectories)} trajectories were excluded from training"
                self.display.message(f"step {step}: {said}, the first because {lost[0]}")
            self._some_lost = bool(lost)
            return
        self._lost_steps += 1
        cause = next((t.error for t in trajectories if t.error), "unknown")
        self.display.message(f"step {step}: every trajectory was excluded, nothing was trained on ({cause})")
        if self._lost_steps == MAX_LOST_STEPS:
            self._lost_steps = 0  # a resumed run counts anew
            self._failure = (
                f"every trajectory of {MAX_LOST_STEPS} steps in a row was excluded; the last error was: {cause}. "
                "Repair the tool or the task."
            )

    def stop_if_lost(self) -> None:
        """Raise ``UserError`` after the step is saved if tools keep failing: the run would learn nothing."""
        if self._failure:
            raise UserError(self._failure)

    def non_finite(
        self, step: int, error: Exception, ids: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> UserError:
        """The error that ends the run over NaN or infinity in ``step``; writes the step's trajectories to a file. The
        trajectories ``ids``, which have the values that are not finite, come first."""
        path = self.run_dir.path / NON_FINITE.format(f"{step:06d}")
        write_jsonl(path, sorted(trajectories, key=lambda t: t.id not in ids))
        saved = list_checkpoints(self.run_dir.checkpoints)
        good = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        return Diverged(
            f"step {step}: {error}. The trajectories are in {path}; {good}. Look at these trajectories, or start a new "
            "run from a policy that is whole (--model CHECKPOINT/policy) with a lower optim.lr."
        )

    # -- weights --------------------------------------------------------------------------------------------------

    def save_best(self, step: int, save_policy: Writer) -> None:
        """Keep the policy of ``step`` as the best one; only its weights, as training goes on from the newest."""
        with self._policy_folder("best", step, save_policy, best=self.config.stage == "rl") as folder:
            _write_state(folder, {"step": step, "success": self._summary.final_success})

    def save_checkpoint(
        self, step: int, save_policy: Writer, save_rest: Writer, state: Mapping[str, Any] | None = None
    ) -> None:
        """Write the checkpoint of ``step`` and delete those that are no longer kept. ``save_policy`` writes the policy
        as a transformers folder, ``save_rest`` what else a resume needs; ``restore`` gives ``state`` back."""
        with self._policy_folder(checkpoint_name(step), step, save_policy, best=False) as folder:
            save_rest(folder)
            own = {
                "step": step,
                "lost_steps": self._lost_steps,
                "wall_s": self._summary.wall_s,
                "scheduled": step == 0 or _is_due(step, self.config.checkpoint.every),
                "ended": self.ended,
                "update_steps": self.config.update.steps,
            }
            _write_state(folder, {**own, **(state or {}), "logs": log_lengths(self.run_dir)})
        prune_checkpoints(self.run_dir.checkpoints, self.config.checkpoint.keep)

    @contextmanager
    def _policy_folder(self, name: str, step: int, save_policy: Writer, *, best: bool) -> Iterator[Path]:
        """A new folder below ``checkpoints`` with the policy and its card, for the block to add the rest."""
        target = self.run_dir.checkpoints / name
        with atomic_folder(target, self._run_id, hash_up_to=self._hash_up_to) as folder:
            save_policy(folder / "policy")
            write_policy_card(folder / "policy", self.run_dir, self.config, self.task, step, best=best)
            yield folder

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Go on from a checkpoint, to whose lengths the logs are cut already; returns what its ``state.json`` holds."""
        state = read_own_json(checkpoint / STATE)
        for line in read_jsonl(self.run_dir.metrics):
            self._summary.observe(line["step"], line)
            self._alarm.observe(line["step"], line)
            self._in_vain += bool(in_vain(line))
        self._summary.saved = saved_best(self.run_dir.checkpoints)
        self._summary.earlier_s = state.get("wall_s", 0.0)
        self._lost_steps = state["lost_steps"]
        if state.get("update_steps") == self.config.update.steps:  # otherwise it is to train on after its end
            self.ended = state["ended"]
        return state


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
