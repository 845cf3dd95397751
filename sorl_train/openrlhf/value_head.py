"""The critic's output layer in float32, beside a DeepSpeed engine that holds the rest of the critic in bfloat16.

ZeRO flattens all parameters of a module into buffers of one dtype, and the 8 bits of bfloat16 are too few for values:
near 0.7 two neighbours differ by 0.004, as much as an advantage late in training. So each rank keeps all of this layer,
with its own AdamW. Its gradient is averaged over the ranks and clipped together with DeepSpeed's by the norm of all of
them: the update is the same as in the local engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_env.errors import UserError
from sorl_train.config.settings import OptimConfig
from sorl_train.learner.backend import set_lr
from sorl_train.learner.optimizer_step import adamw, load_optimizers, save_optimizers
from sorl_train.models.policy import VALUE_HEAD_FILE

OPTIMIZER_FILE = "value_head_optimizer.safetensors"


class ValueHead:
    """Values V(s_t) from the hidden states (N, H) of N positions; all 0 until the head is trained or loaded.

    Args:
        engine: the DeepSpeed engine around the critic, whose gradient norm then includes the head's gradient.
    """

    def __init__(self, engine: Any, optim: OptimConfig) -> None:
        device = next(engine.module.parameters()).device
        self.linear = nn.Linear(engine.module.config.hidden_size, 1, dtype=torch.float32, device=device)
        # as in the local engine: the first advantages are the rewards themselves
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.optimizer = adamw(self.linear, optim)
        self._limit = optim.max_grad_norm
        self._norm = torch.zeros((), device=device)
        _count_in_the_norm(engine, lambda: self._norm)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Values (N,), float32."""
        return self.linear(hidden.float()).squeeze(-1)

    def average_gradient(self) -> bool:
        """Average the gradient over the ranks; call it before DeepSpeed's step. False if it is not finite."""
        gradients = [parameter.grad for parameter in self.linear.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        self._norm = nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(self._norm))

    def step(self, lr: float, norm: float) -> None:
        """Clip by ``norm``, the norm of all gradients of the critic, and step; call it after DeepSpeed's step."""
        if self._limit is not None:
            factor = min(1.0, self._limit / (norm + 1e-6))
            for parameter in self.linear.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        """The weights and the optimizer's state."""
        weights = self.linear.state_dict().items()
        save_file({name: value.detach().cpu() for name, value in weights}, folder / VALUE_HEAD_FILE)
        save_optimizers(folder / OPTIMIZER_FILE, {"head": self.optimizer})

    def load(self, folder: Path) -> None:
        """Load what ``save`` wrote, or the weights alone if the folder is a critic of the local engine."""
        file = folder / VALUE_HEAD_FILE
        try:
            self.linear.load_state_dict(load_file(file))
        except RuntimeError as error:
            width = self.linear.in_features
            raise UserError(f"{file} does not fit a critic of width {width}: {error}") from error
        if (folder / OPTIMIZER_FILE).is_file():
            load_optimizers(folder / OPTIMIZER_FILE, {"head": self.optimizer})


def _count_in_the_norm(engine: Any, extra: Any) -> None:
    """Include the norm ``extra`` in the gradient norm that DeepSpeed clips by and reports."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        norms = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [*(group := norms()), extra().to(group[0])]
    else:
        norm = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda: torch.hypot(own := norm(), extra().to(own))
