"""Gradients, steps and weights of a DeepSpeed engine: what our updates need of it with ZeRO stage 2 or 3."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_train.learner.optimizer_step import set_lr
from sorl_train.losses.terms import sum_over_ranks

PIECE = 1 << 24  # elements of a gradient that are looked at together


class DeepSpeedStep:
    """Backward passes and steps of a DeepSpeed engine, which accumulates, averages over ranks, clips and steps."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        # DeepSpeed divides by both, but our losses are already divided by what belongs to the whole mini-batch
        self._undo = engine.gradient_accumulation_steps() * dist.get_world_size()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of one micro-batch; after the last one, call ``apply``.

        DeepSpeed would count micro-batches, always as many, while a mini-batch may have fewer trajectories than others.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self._undo)

    def apply(self, lr: float, grad_scale: float = 1.0, limit: float | None = None) -> float:
        """Scale the gradient, clip it to ``limit`` (None: DeepSpeed's own), step with rate ``lr``.

        Returns the gradient's norm before scaling and clipping; NaN on all ranks, and no step, if the gradient is not
        finite on one. DeepSpeed does not report that in bfloat16: ZeRO-3 takes the norm to be 1 and steps, ZeRO-2 takes
        no step and keeps the last norm. Scaling goes through the loss scale, by which it divides before it clips.
        """
        optimizer = self.engine.optimizer
        if self.engine.zero_optimization_stage() == 3 and not _is_finite(
            optimizer.grad_partitions_flat_buffer
        ):
            return math.nan
        set_lr(optimizer, lr)
        usual_limit = optimizer.clip_grad
        optimizer.override_loss_scale(1.0 / grad_scale)
        optimizer.clip_grad = usual_limit if limit is None else limit
        try:
            self.engine.step()
        finally:
            optimizer.override_loss_scale(1.0)
            optimizer.clip_grad = usual_limit
        return math.nan if optimizer.overflow else float(self.engine.get_global_grad_norm()) / grad_scale

    def discard_gradient(self) -> None:
        """Take DeepSpeed's step with an optimizer that does nothing: gradients are freed."""
        optimizer = self.engine.optimizer
        optimizer._optimizer_step = lambda group: None  # hides the class's method
        try:
            self.engine.step()
        finally:
            del optimizer._optimizer_step

    def weights(self) -> list[Tensor]:
        """This rank's shard of the weights that the optimizer steps on, which are float32."""
        optimizer = self.engine.optimizer
        if self.engine.zero_optimization_stage() == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def copy_weights(self) -> None:
        """Copy the shards of all ranks to the weights of the forward pass, as DeepSpeed does after each step."""
        optimizer = self.engine.optimizer
        if self.engine.zero_optimization_stage() != 3:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()  # what is gathered now would keep its old values
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:  # small ones that every rank holds
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()


def _is_finite(gradients: Tensor) -> bool:
    """Whether the gradients of all ranks are finite; in pieces, as a check of a whole shard doubles its memory."""
    finite = torch.stack([piece.isfinite().all() for piece in gradients.split(PIECE)]).all()
    (broken,) = sum_over_ranks(float(not finite))
    return not broken
