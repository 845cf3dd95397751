"""The critic's output layer in float32, beside a DeepSpeed engine that holds the rest of the critic in bfloat16.

DeepSpeed casts every parameter of its module to bfloat16, and ZeRO flattens all of them into buffers of one dtype, so
a float32 layer cannot live inside. A value of 8 bits is too coarse: next to 0.7 its neighbours are 0.004 away, which is
as much as an advantage late in training. The layer has the width of the model and one bias, so each rank keeps all of
it, with an AdamW of its own. Gradients are averaged over the ranks as DeepSpeed's are, and both are clipped by the norm
of all of them together: the update is that of the local engine.
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
from sorl_train.learner.update import set_lr
from sorl_train.models.critic import VALUE_HEAD_FILE
from sorl_train.run.checkpoint import load_optimizers, save_optimizers

OPTIMIZER_FILE = "value_head_optimizer.safetensors"


class ValueHead:
    """V(s_t) from the hidden state (N, H) of N positions; 0 everywhere until it is trained or loaded.

    Args:
        engine: the DeepSpeed engine around the critic, whose clipping then counts the head's gradient, too.
    """

    def __init__(self, engine: Any, optim: OptimConfig) -> None:
        device = next(engine.module.parameters()).device
        self.linear = nn.Linear(engine.module.config.hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(
            self.linear.weight
        )  # as the local engine's: the first advantages are the rewards themselves
        nn.init.zeros_(self.linear.bias)
        self.optimizer = torch.optim.AdamW(
            self.linear.parameters(),
            betas=(optim.beta1, optim.beta2),
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
        )
        self._limit = optim.max_grad_norm
        self._norm = torch.zeros((), device=device)
        _count_in_the_norm(engine, lambda: self._norm)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Values (N,), float32."""
        return self.linear(hidden.float()).squeeze(-1)

    def average_gradient(self) -> bool:
        """Average the gradient over the ranks, before DeepSpeed's step; False when it is not finite."""
        gradients = [parameter.grad for parameter in self.linear.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        self._norm = nn.utils.get_total_norm(gradients)
        return bool(torch.isfinite(self._norm))

    def step(self, lr: float, norm: float) -> None:
        """Clip by ``norm``, which is that of all the critic's gradients, and step; after DeepSpeed's own step."""
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
        weights = {
            name: value.detach().cpu().contiguous() for name, value in self.linear.state_dict().items()
        }
        save_file(weights, folder / VALUE_HEAD_FILE)
        save_optimizers(folder / OPTIMIZER_FILE, {"head": self.optimizer})

    def load(self, folder: Path) -> None:
        """What ``save`` wrote. The weights alone, when a critic of the local engine wrote the folder."""
        file = folder / VALUE_HEAD_FILE
        try:
            self.linear.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise UserError(
                f"{file} does not fit a critic of width {self.linear.in_features}: {error}"
            ) from error
        if (folder / OPTIMIZER_FILE).is_file():
            load_optimizers(folder / OPTIMIZER_FILE, {"head": self.optimizer})


def _count_in_the_norm(engine: Any, extra: Any) -> None:
    """From now on the norm by which DeepSpeed clips, and which it reports, has one more gradient in it."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        norms = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [*(group := norms()), extra().to(group[0])]
    else:
        norm = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda: torch.hypot(own := norm(), extra().to(own))
