"""Checkpoints: weights as plain transformers folders, everything else as safetensors and JSON, never a pickle.

::

    checkpoints/step_000040/
        policy/                  config.json, model.safetensors, tokenizer: loads with transformers and vLLM
        critic/                  the same, and value_head.safetensors
        optimizer.safetensors    actor.* and critic.*
        stale.*                  trajectories waiting to be trained on (staleness)
        state.json               step, optimizer steps, best figures

A folder appears under its name only when it is complete. All randomness comes from the seed and the step, so there is
no generator state to keep.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.errors import UserError

_NAME = re.compile(r"step_(\d{6,})")


def checkpoint_name(step: int) -> str:
    """Name of a step's folder; names sort as steps do."""
    return f"step_{step:06d}"


def write_checkpoint(folder: Path, write: Callable[[Path], None]) -> Path:
    """Have ``write`` fill a temporary folder, then give it its name ``folder`` (replacing an older one) at once."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    for path in temporary.rglob("*"):
        if path.is_file():
            _sync(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def newest_checkpoint(folder: Path) -> Path:
    """The complete checkpoint with the highest step. Raises UserError when there is none."""
    found = list_checkpoints(folder)
    if not found:
        raise UserError(
            f"nothing to resume: no checkpoint in {folder}; start anew with another --run_dir or --overwrite"
        )
    return found[-1]


def last_before(folder: Path, step: int) -> Path:
    """The newest complete checkpoint before ``step``; the oldest one where there is none. UserError without any."""
    newest_checkpoint(folder)
    found = list_checkpoints(folder)
    earlier = [path for path in found if path.name < checkpoint_name(step)]
    return earlier[-1] if earlier else found[0]


def drop_later(checkpoint: Path) -> None:
    """Delete the checkpoints of later steps than this one's: of steps that are taken back."""
    found = list_checkpoints(checkpoint.parent)
    for path in found[found.index(checkpoint) + 1 :]:
        shutil.rmtree(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    steps = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(steps)]


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest (at least one), and what a killed run left half written."""
    for path in list_checkpoints(folder)[: -max(1, keep)]:
        shutil.rmtree(path)
    for path in folder.glob(".*"):
        shutil.rmtree(path)


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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
