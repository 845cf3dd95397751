"""What the optimizer steps of policy and critic share: AdamW and its file, micro-batches, means of metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_train.algorithms import Aggregation
from sorl_train.config.settings import OptimConfig
from sorl_train.learner.backend import Backend
from sorl_train.learner.batch import Batch
from sorl_train.losses.terms import loss_denominator, sum_over_ranks

# Parameters whose names contain one of these, as in OpenRLHF's ``get_optimizer_grouped_parameters``
NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


class NonFiniteError(RuntimeError):
    """NaN or infinity in a loss, a gradient or a log-probability of the trajectories ``trajectory_ids``."""

    def __init__(self, what: str, trajectory_ids: tuple[str, ...]) -> None:
        shown = ", ".join(trajectory_ids[:8]) + (", .." if len(trajectory_ids) > 8 else "")
        super().__init__(f"{what} is not finite; trajectories: {shown}")
        self.what = what
        self.trajectory_ids = trajectory_ids

    def __reduce__(self) -> Any:  # so that it can be pickled by the process that raises it
        return type(self), (self.what, self.trajectory_ids)


def adamw(model: nn.Module, optim: OptimConfig, lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW as configured for what the model trains, with weight decay of all but biases and norms.

    ``positions`` of a group are those of its parameters among all that are trained, in the model's order.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        chosen = [
            i for i, (name, _) in enumerate(trained) if decays != any(part in name for part in NO_DECAY)
        ]
        decay = optim.weight_decay if decays else 0.0
        if chosen:
            groups.append(
                {"params": [trained[i][1] for i in chosen], "positions": chosen, "weight_decay": decay}
            )
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=optim.adam_eps, fused=True)


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


def mean_over(mini: Batch, aggregation: Aggregation) -> dict[str, Any]:
    """Arguments that make every loss of a micro-batch its part of the mean over the whole mini-batch."""
    (denominator,) = sum_over_ranks(loss_denominator(mini.loss_mask, aggregation))
    return {"aggregation": aggregation, "denominator": denominator}


def on_device(mini: Batch, size: int, backend: Backend) -> Iterator[tuple[Tensor, Batch, bool]]:
    """The micro-batches of ``mini``: their rows (N,) in it, themselves on the device, whether it is the last."""
    micros = list(mini.micro_batches(size, by_group=backend.uses_packing))
    for number, (rows, micro) in enumerate(micros, start=1):
        yield rows, micro.to(backend.device), number == len(micros)


PEAKS = ("grad_norm", "clip_bias_norm")  # metrics whose largest value is reported beside their mean


class Means:
    """Running means of metrics by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, **values: float) -> None:
        """Count one more value of each of these metrics."""
        for name, value in values.items():
            self._values[name].append(value)

    def any(self, name: str) -> bool:
        """Whether a value other than 0 was added."""
        return any(self._values[name])

    def result(self, prefix: str = "loss/") -> dict[str, float]:
        """The means, the largest values of ``PEAKS`` and the number of optimizer steps."""
        means = {prefix + name: math.fsum(values) / len(values) for name, values in self._values.items()}
        peaks = {f"{prefix}{name}_max": max(self._values[name]) for name in PEAKS if name in self._values}
        steps = {prefix + "policy_updates": float(len(self._values["lr"]))} if "lr" in self._values else {}
        return means | peaks | steps
