"""Checkpoints: weights as plain transformers folders, everything else as safetensors and JSON, never a pickle.

::

    checkpoints/step_000040/
        policy/                  config.json, model.safetensors, tokenizer: loads with transformers and vLLM
        critic/                  the same, and value_head.safetensors
        optimizer.safetensors    actor.* and critic.*
        stale.*                  trajectories waiting to be trained on (staleness)
        state.json               step, optimizer steps, best figures, lengths of the run's metrics files
        hashes.json              a hash of each of these files, and the run that they belong to

A folder appears under its name only when it is complete (``hashed_folder``), and after the row of its step is in the
metrics. A run goes on from the newest one that is whole; newer ones are set aside, as ``damaged_step_000060``. All
randomness comes from the seed and the step, so there is no generator state to keep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.errors import UserError
from sorl_train.run.folder import RunDir
from sorl_train.run.hashed_folder import find_damage, remove_folder, remove_leftovers, restore_replaced
from sorl_train.run.log_lengths import Lengths, check_logs

_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Whole:
    """A checkpoint of which every file is as it was written.

    Attributes:
        path: its folder.
        damaged: the checkpoints that would have been taken before it, with what is wrong with each file.
    """

    path: Path
    damaged: dict[Path, list[str]]

    @property
    def passed_over(self) -> list[str]:
        """One sentence for each damaged checkpoint, for the terminal and ``events.jsonl``."""
        return [f"passed over {path.name}: {'; '.join(why)}" for path, why in self.damaged.items()]


def checkpoint_name(step: int) -> str:
    """Name of a step's folder; names sort as steps do."""
    return f"step_{step:06d}"


def resume_point(run_dir: RunDir) -> Whole:
    """The checkpoint of the highest step that is whole and belongs to the run; its files are read, none is changed.

    Raises:
        UserError: there is no checkpoint, or all of them are damaged, or the metrics files are: the message names
            every damaged file and says what can be done.
    """
    run_id = run_dir.intact_manifest()["run_id"]
    restore_replaced(run_dir.checkpoints)
    found = _first_whole(run_dir.checkpoints, reversed(list_checkpoints(run_dir.checkpoints)), run_id)
    check_logs(run_dir, logs_at(found.path))
    return found


def logs_at(checkpoint: Path) -> Lengths:
    """How long the run's metrics files were when a checkpoint was written."""
    lengths: Lengths = read_json(checkpoint / "state.json")["logs"]
    return lengths


def last_whole_before(run_dir: RunDir, step: int) -> Whole:
    """The newest whole checkpoint before ``step``; the oldest whole one where there is none. Raises ``UserError`` when
    none is whole."""
    found = list_checkpoints(run_dir.checkpoints)
    earlier = [path for path in found if path.name < checkpoint_name(step)]
    candidates = [*reversed(earlier), *found[len(earlier) :]]
    return _first_whole(run_dir.checkpoints, candidates, run_dir.run_id)


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
    """Rename damaged checkpoints, so that neither a resume nor pruning counts them; none is deleted."""
    for path in damaged:
        aside, number = path.with_name(f"damaged_{path.name}"), 2
        while aside.exists():
            aside, number = path.with_name(f"damaged_{path.name}-{number}"), number + 1
        path.rename(aside)


def drop_later(checkpoint: Path) -> None:
    """Delete the checkpoints of later steps than this one's: of steps that are taken back."""
    found = list_checkpoints(checkpoint.parent)
    for path in reversed(found[found.index(checkpoint) + 1 :]):
        remove_folder(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their names, oldest first, whether they are whole or not."""
    steps = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(steps)]


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest (at least one), and what a killed run left half written."""
    for path in list_checkpoints(folder)[: -max(1, keep)]:
        remove_folder(path)
    remove_leftovers(folder)


def save_optimizers(path: Path, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Moments and step counters of named optimizers, as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"{name}.{index}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    save_file(tensors, path)


def load_optimizers(path: Path, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Inverse of ``save_optimizers``; learning rates are the schedule's business."""
    states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in optimizers}
    for full_name, tensor in load_file(path).items():
        name, index, key = full_name.split(".")
        states[name].setdefault(int(index), {})[key] = tensor
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(
            {"state": states[name], "param_groups": optimizer.state_dict()["param_groups"]}
        )


def write_json(path: Path, content: Any) -> None:
    """Write a small file of JSON, for people to read too."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Inverse of ``write_json``."""
    return json.loads(path.read_text(encoding="utf-8"))
