"""The files of a local checkpoint beside the models: optimizers, and batches that wait to be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.trajectory import Trajectory, read_jsonl, write_jsonl
from sorl_train.learner.batch import Batch

_SCORES = ("old_log_probs", "ref_log_probs", "values")


@dataclass(frozen=True)
class Collected:
    """One step's trajectories, and the tensors of those to train on (None if there are none)."""

    trajectories: list[Trajectory]
    batch: Batch | None


def save_optimizers(path: Path, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Write moments and step counters of named optimizers, made by ``adamw``, into one safetensors file.

    Names have a parameter's position in the model, whichever parameters are together in a group.
    """
    tensors: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        positions = _positions(optimizer)
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"{name}.{positions[index]}.{key}"] = (
                    torch.as_tensor(value).detach().cpu().contiguous()
                )
    save_file(tensors, path)


def load_optimizers(path: Path, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Inverse of ``save_optimizers``. Learning rates are not in the file: the schedule sets them at each step."""
    states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in optimizers}
    index_of = {
        name: {position: index for index, position in enumerate(_positions(optimizer))}
        for name, optimizer in optimizers.items()
    }
    for full_name, tensor in load_file(path).items():
        name, position, key = full_name.split(".")
        states[name].setdefault(index_of[name][int(position)], {})[key] = tensor
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(
            {"state": states[name], "param_groups": optimizer.state_dict()["param_groups"]}
        )


def _positions(optimizer: torch.optim.Optimizer) -> list[int]:
    """For each parameter in the optimizer's order, its position in the model's."""
    return [position for group in optimizer.param_groups for position in group["positions"]]


def save_waiting(folder: Path, waiting: Iterable[Collected]) -> None:
    """Write the batches that wait, with their scores: the weights that computed these are gone after a resume."""
    for number, item in enumerate(waiting):
        write_jsonl(folder / f"stale_{number}.jsonl", item.trajectories)
        if item.batch is not None:
            scores = ((name, getattr(item.batch, name)) for name in _SCORES)
            found = {name: values for name, values in scores if values is not None}
            save_file(found, folder / f"stale_{number}.safetensors")


def load_waiting(folder: Path, usable: Callable[[list[Trajectory]], Batch | None]) -> list[Collected]:
    """Inverse of ``save_waiting``; ``usable`` makes the tensors of those trajectories that are trained on."""
    waiting: list[Collected] = []
    while (path := folder / f"stale_{len(waiting)}.jsonl").is_file():
        trajectories = list(read_jsonl(path))
        batch = usable(trajectories)
        if batch is not None:
            batch = batch.with_fields(**load_file(path.with_suffix(".safetensors")))
        waiting.append(Collected(trajectories, batch))
    return waiting
