"""What an update needs of whatever holds a model's weights, gradients and optimizer.

``PolicyUpdate`` and ``CriticUpdate`` are the algorithm; a ``Backend`` is one way to run a model. ``TorchBackend`` is a
plain torch module on one device, ``openrlhf.deepspeed_backend`` a DeepSpeed engine with weights split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sorl_train.learner.batch import Batch
from sorl_train.losses.log_probs import TokenStats
from sorl_train.models.forward import action_stats, autocast
from sorl_train.models.packing import uses_packing


class Backend(Protocol):
    """A model, its gradient and its optimizer."""

    model: Any  # the torch module
    parameters: Sequence[nn.Parameter]  # those that are trained
    device: torch.device  # where inputs have to be
    # whether micro-batches whose gradient is zero need ``backward``, too, as where ranks go through it together
    always_backward: bool

    @property
    def uses_packing(self) -> bool:
        """Whether rollouts of a group share the computation of their prompt, so that they belong together."""

    def log_probs(self, micro: Batch, mask: Tensor, **wanted: bool) -> TokenStats:
        """Log-probabilities of the tokens of ``mask``, and the other ``TokenStats`` that are wanted, (B, T)."""

    def values(self, micro: Batch, mask: Tensor) -> Tensor:
        """A critic's values (B, T), float32, of the tokens of ``mask``, 0 elsewhere."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's ``loss``, a scalar; ``last`` is True for the last one of a mini-batch."""

    def step(self, lr: float, limit: float | None, grad_scale: float = 1.0) -> float:
        """Multiply the gradient by ``grad_scale``, clip it to the norm ``limit``, and step with the rate ``lr``.

        Returns the gradient's norm before both. If that is not finite, on any rank, no step is taken.
        """

    def weights(self) -> Sequence[Tensor]:
        """The weights that the optimizer steps on, as this rank holds them: each of its own shape, in a fixed order."""

    def sync_weights(self) -> None:
        """Bring copies of ``weights`` up to date after they were moved."""

    def discard_gradient(self) -> None:
        """Forget the gradient since the last step, if there is one."""


class TorchBackend:
    """``Backend`` of a plain torch module on one device; without ``optimizer`` it only computes."""

    always_backward = False

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        dtype: str = "auto",
        temperature: float = 1.0,
    ) -> None:
        self.model = model
        self.parameters: Sequence[nn.Parameter] = [p for p in model.parameters() if p.requires_grad]
        self.device: torch.device = next(model.parameters()).device
        self._optimizer = optimizer
        self._dtype = dtype
        self._temperature = temperature

    @property
    def uses_packing(self) -> bool:
        return uses_packing(getattr(self.model, "backbone", self.model))  # a critic has a backbone

    def log_probs(self, micro: Batch, mask: Tensor, **wanted: bool) -> TokenStats:
        with autocast(self._dtype, self.device):
            return action_stats(self.model, micro.token_ids, mask, temperature=self._temperature, **wanted)

    def values(self, micro: Batch, mask: Tensor) -> Tensor:
        with autocast(self._dtype, self.device):
            values: Tensor = self.model(micro.token_ids, mask)
        return values

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, lr: float, limit: float | None, grad_scale: float = 1.0) -> float:
        assert self._optimizer is not None
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = float(nn.utils.get_total_norm(gradients))
        if not math.isfinite(grad_norm):
            return grad_norm
        if grad_scale != 1.0:
            torch._foreach_mul_(gradients, grad_scale)
        if limit is not None:
            nn.utils.clip_grad_norm_(self.parameters, limit)
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self.discard_gradient()
        return grad_norm

    def weights(self) -> Sequence[Tensor]:
        return self.parameters

    def sync_weights(self) -> None:
        """There are no copies."""

    def discard_gradient(self) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad(set_to_none=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all groups of parameters the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
