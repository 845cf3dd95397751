"""What a checkpoint of the local engine holds beside the models: all that a run needs to go on as if never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import read_jsonl, write_jsonl
from sorl_train.learner.batch import Batch
from sorl_train.run.checkpoint import load_optimizers, read_json, save_optimizers, write_json


@dataclass(frozen=True)
class Collected:
    """One step's trajectories and the tensors of those not excluded (None if there are none)."""

    trajectories: list[Trajectory]
    batch: Batch | None


def write_state(
    folder: Path,
    optimizers: dict[str, torch.optim.Optimizer],
    waiting: Iterable[Collected],
    counters: Mapping[str, Any],
) -> None:
    """Optimizers, the batches that wait to be trained on, and ``counters``, which are JSON values."""
    save_optimizers(folder / "optimizer.safetensors", optimizers)
    number = 0
    for number, item in enumerate(waiting, start=1):
        write_jsonl(folder / f"stale_{number - 1}.jsonl", item.trajectories)
        if item.batch is not None:  # scored with weights that are gone by now
            save_file(_scores(item.batch), folder / f"stale_{number - 1}.safetensors")
    write_json(folder / "state.json", {**counters, "waiting": number})


def load_state(
    folder: Path,
    optimizers: dict[str, torch.optim.Optimizer],
    collate: Callable[[list[Trajectory]], Batch],
) -> tuple[dict[str, Any], list[Collected]]:
    """Inverse of ``write_state``: loads the optimizers, and returns the counters and the batches that wait."""
    load_optimizers(folder / "optimizer.safetensors", optimizers)
    counters = read_json(folder / "state.json")
    waiting = []
    for number in range(counters["waiting"]):
        trajectories = list(read_jsonl(folder / f"stale_{number}.jsonl"))
        usable = [t for t in trajectories if not t.excluded]
        scores = load_file(folder / f"stale_{number}.safetensors") if usable else {}
        batch = collate(usable).with_fields(**scores) if usable else None
        waiting.append(Collected(trajectories, batch))
    return counters, waiting


def _scores(batch: Batch) -> dict[str, Tensor]:
    """What the engine's ``score`` filled in."""
    names = ("old_log_probs", "ref_log_probs", "values")
    return {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
