"""Checkpoints of both engines: where they lie, which one a run goes on from, and which ones are deleted.

::

    checkpoints/best/
        policy/                  the policy of the best evaluation so far
        state.json               its step and success
    checkpoints/step_000040/
        policy/                  config.json, model.safetensors, tokenizer: loads with transformers and vLLM
        state.json               step, best figures so far, lengths of the run's log files
        hashes.json              size and hash of each of these files, and the run that they belong to

    of the local engine:         critic/ (as policy/, and value_head.safetensors), optimizer.safetensors,
                                 stale_N.* (batches that wait to be trained on), replay.* (the replay buffer);
                                 nothing is a pickle
    of the OpenRLHF engine:      _actor/ and _critic/ (DeepSpeed's shards, under the names where OpenRLHF looks)

A folder appears under its name only when it is complete (``hashed_folder``), and after the metrics of its step were
logged. All parts of a step are one folder, so no resume can combine the actor of one step with the critic of another. A
run goes on from the newest checkpoint that is whole; newer ones are renamed, to ``damaged_step_000060`` for instance.
All randomness follows from the seed and the step, so no generator's state has to be kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sorl_env.errors import UserError
from sorl_train.run.files import free_name, read_own_json
from sorl_train.run.folder import RunDir
from sorl_train.run.hashed_folder import find_damage, remove_folder, remove_leftovers, restore_replaced
from sorl_train.run.metrics_log import Lengths, check_logs, cut_logs

STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Whole:
    """A checkpoint of which every file is as it was written.

    Attributes:
        path: its folder.
        damaged: the checkpoints that would have been taken before it, each with what is wrong with its files.
    """

    path: Path
    damaged: dict[Path, list[str]]

    @property
    def step(self) -> int:
        """The training steps that were done when it was written."""
        return step_of(self.path)

    @property
    def passed_over(self) -> list[str]:
        """One sentence for each damaged checkpoint, for the terminal and ``events.jsonl``."""
        return [f"passed over {path.name}: {'; '.join(why)}" for path, why in self.damaged.items()]


def checkpoint_name(step: int) -> str:
    """The name of a step's folder. Names sort as steps do."""
    return f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The inverse of ``checkpoint_name``."""
    return int(checkpoint.name.removeprefix("step_"))


def resume_point(run_dir: RunDir) -> Whole:
    """The newest checkpoint that is whole and belongs to the run. All of its files are read, none is changed.

    Raises:
        UserError: there is no checkpoint, or all of them are damaged, or the log files are. The message names every
            damaged file and says what can be done.
    """
    run_id = run_dir.intact_manifest()["run_id"]
    restore_replaced(run_dir.checkpoints)
    found = _first_whole(run_dir.checkpoints, reversed(list_checkpoints(run_dir.checkpoints)), run_id)
    check_logs(run_dir, logs_at(found.path))
    return found


def rewind(run_dir: RunDir, checkpoint: Path) -> None:
    """Bring the run's folder to where it was when the checkpoint was written: cut the log files back, and delete what
    a killed run left half written."""
    run_dir.remove_leftovers()
    remove_leftovers(run_dir.checkpoints)
    cut_logs(run_dir, logs_at(checkpoint))


def best_ahead(checkpoint: Path) -> tuple[int, float] | None:
    """Step and success of the policy in ``best``, if it is of a later step than the checkpoint: the run was killed in
    between, or later checkpoints are damaged. None also where an older version wrote it, or it is damaged."""
    best = checkpoint.parent / "best"
    if find_damage(best) or not (best / STATE).is_file():
        return None
    state = read_own_json(best / STATE)
    return (state["step"], state["success"]) if state["step"] > step_of(checkpoint) else None


def logs_at(checkpoint: Path) -> Lengths:
    """How long the run's log files were when the checkpoint was written."""
    lengths: Lengths = read_own_json(checkpoint / STATE)["logs"]
    return lengths


def _first_whole(folder: Path, candidates: Iterable[Path], run_id: str) -> Whole:
    damaged: dict[Path, list[str]] = {}
    for path in candidates:
        damage = find_damage(path, run_id)
        if not damage:
            return Whole(path, damaged)
        damaged[path] = damage
    if not damaged:
        raise UserError(
            f"nothing to resume: no checkpoint in {folder}; start anew with another --run_dir or --overwrite"
        )
    lines = "\n".join(f"  {path.name}: {line}" for path, why in damaged.items() for line in why)
    raise UserError(
        f"no checkpoint in {folder} is whole:\n{lines}\nRestore these files from a copy, or start anew with another "
        "--run_dir or --overwrite (which moves this run aside)."
    )


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename damaged checkpoints, so that neither a resume nor pruning counts them. None is deleted."""
    for path in damaged:
        path.rename(free_name(path.with_name(f"damaged_{path.name}")))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their names, oldest first, whether they are whole or not."""
    return sorted((path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)), key=step_of)


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but ``keep`` checkpoints (at least one stays), and what a killed run left half written.

    The newest stays, and before it the newest of those that ``checkpoint.every`` asked for: one that a signal asked for
    leaves no trace after the next, so a run that was stopped and resumed keeps the same ones as one that was not.
    """
    found = list_checkpoints(folder)
    older = [path for path in found[:-1] if _is_scheduled(path)]
    kept = {*found[-1:], *older[max(0, len(older) - keep + 1) :]}
    for path in found:
        if path not in kept:
            remove_folder(path)
    remove_leftovers(folder)


def _is_scheduled(checkpoint: Path) -> bool:
    """Whether ``checkpoint.every`` asked for it. One of an older version, or a damaged one, counts as such."""
    try:
        return bool(read_own_json(checkpoint / STATE).get("scheduled", True))
    except UserError:
        return True
