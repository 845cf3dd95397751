"""Finds the policy that a command names: a model folder, a checkpoint, a run (its best one), or a hub name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig
from sorl_train.models.find_model import is_hub_name, no_model
from sorl_train.run.checkpoint import HASHES, find_damage, list_checkpoints
from sorl_train.run.folder import RunDir, saved_config

_CARD = "README.md"  # as in run.cards, whose import would import torch
_SMALL = 1 << 24  # bytes; of larger files only the beginning and the end are hashed


@dataclass(frozen=True)
class PolicySource:
    """Where a policy is, and the run that made it."""

    label: str  # its name in tables and folders
    folder: str  # a transformers folder, or a name on the hub
    run: Path | None = None  # None, as the config, for a model that no run made
    config: TrainConfig | None = None


def find_policy(model: str) -> PolicySource:
    """The policy in a run folder (its best checkpoint), a checkpoint or a transformers folder, or of a hub name. Raises
    ``UserError`` if the path does not exist, or is another kind of folder; the message says what is there."""
    path = Path(model).expanduser()
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        return _of_checkpoint(_best(path), path)
    # a relative path has no parents above the folder of the command; resolve() would leave a run through a link
    path = Path(os.path.abspath(path))  # noqa: PTH100
    if (path / "policy" / "config.json").is_file():
        return _of_checkpoint(path, path.parent.parent)
    if (path / "config.json").is_file():
        if path.name == "policy":
            return _of_checkpoint(path.parent, path.parent.parent.parent)
        return PolicySource(path.resolve().name, str(path))
    if path.is_dir():
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise UserError(
            f"{model} is neither a model folder (config.json) nor a checkpoint (policy/) nor a run (config.yaml with "
            f"checkpoints/); it holds {names}"
        )
    if is_hub_name(model):
        return PolicySource(model.rpartition("/")[2], model)
    if path.exists():
        raise UserError(f"{model} is a file; give a model folder, a checkpoint or a run folder")
    raise UserError(no_model(model))


def _best(run: Path) -> Path:
    folder = RunDir(run).checkpoints
    best = folder / "best"
    if (best / "policy").is_dir():
        return best
    found = [path for path in list_checkpoints(folder) if (path / "policy").is_dir()]
    if not found:
        raise UserError(
            f"{run} is a run without a checkpoint yet; give a model folder, or train on with --resume"
        )
    return found[-1]


def _of_checkpoint(checkpoint: Path, run: Path) -> PolicySource:
    """Raises ``UserError`` if a file of the policy is not as the run wrote it. Without hashes nothing is checked."""
    damage = find_damage(checkpoint, allow_more=True) if (checkpoint / HASHES).is_file() else []
    if damage:
        lines = "\n".join(f"  {line}" for line in damage)
        raise UserError(
            f"{checkpoint} is damaged:\n{lines}\nGive another checkpoint of the run, or restore these files from a "
            "copy."
        )
    if not (run / "config.yaml").is_file():  # a checkpoint that was copied elsewhere
        return PolicySource(checkpoint.resolve().name, str(checkpoint / "policy"))
    name = run.resolve().name
    label = name if checkpoint.name == "best" else f"{name}-{checkpoint.name}"
    return PolicySource(label, str(checkpoint / "policy"), run, saved_config(run, check=False))


def fingerprint(folder: str) -> Mapping[str, Any]:
    """A hash that identifies a model folder. It covers all files but the card, whose text changes no answer; of a large
    file only its size, beginning and end."""
    path = Path(folder)
    if not path.is_dir():
        return {"hub": folder}
    digest = hashlib.sha256()
    for file in sorted(entry for entry in path.iterdir() if entry.is_file() and entry.name != _CARD):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= _SMALL:
                digest.update(stream.read())
            else:
                digest.update(stream.read(_SMALL // 2))
                stream.seek(size - _SMALL // 2)
                digest.update(stream.read())
    return {"sha256": digest.hexdigest()}
