"""Our updates on a DeepSpeed engine with ZeRO stage 2 or 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sorl_train.learner.backend import set_lr
from sorl_train.learner.batch import Batch
from sorl_train.losses.log_probs import TokenStats
from sorl_train.losses.terms import sum_over_ranks
from sorl_train.models.forward import logit_stats
from sorl_train.openrlhf.value_head import ValueHead

PIECE = 1 << 24  # elements of a gradient that are looked at together


class DeepSpeedBackend:
    """``Backend`` of a DeepSpeed engine, which gathers sharded weights, averages over ranks, clips and steps.

    Args:
        engine: around a causal language model, or around OpenRLHF's critic, whose outputs ``head`` reads.
    """

    always_backward = True  # all ranks have to go through the backward pass together
    packs = False

    def __init__(self, engine: Any, *, temperature: float = 1.0, head: ValueHead | None = None) -> None:
        self.engine = engine
        self.model = engine.module
        self.parameters: Sequence[nn.Parameter] = list(engine.module.parameters())
        self.device: torch.device = self.parameters[0].device
        self._temperature = temperature
        self._head = head
        # DeepSpeed divides by both, but our losses are already divided by what belongs to the whole mini-batch
        self._undo = engine.gradient_accumulation_steps() * dist.get_world_size()
        self._has_gradient = False

    def log_probs(self, micro: Batch, mask: Tensor, **wanted: bool) -> TokenStats:
        logits = self.engine(input_ids=micro.token_ids[:, :-1], use_cache=False).logits[mask]
        return logit_stats(logits, micro.token_ids, mask, temperature=self._temperature, **wanted)

    def values(self, micro: Batch, mask: Tensor) -> Tensor:
        assert self._head is not None
        columns = torch.arange(micro.token_ids.shape[1], device=micro.token_ids.device)
        lengths = micro.lengths.to(micro.token_ids.device)
        # without an action mask OpenRLHF's critic returns the outputs of its backbone and skips its bfloat16 head
        outputs = self.engine(
            micro.token_ids, attention_mask=(columns < lengths[:, None]).long(), return_output=True
        )
        values = self._head(outputs.last_hidden_state[:, :-1][mask])
        return torch.zeros(mask.shape, device=values.device).masked_scatter(mask, values)

    def backward(self, loss: Tensor, last: bool) -> None:
        """As ``Backend.backward``. DeepSpeed would count micro-batches, of which a mini-batch may have fewer."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self._undo)
        self._has_gradient = True

    def step(self, lr: float, limit: float | None, grad_scale: float = 1.0) -> float:
        """As ``Backend.step``; the gradient of ``head`` is part of the norm.

        DeepSpeed does not report a gradient in bfloat16 that is not finite: ZeRO-3 takes the norm to be 1 and steps,
        ZeRO-2 takes no step and keeps the last norm. Scaling goes through the loss scale, by which it divides before it
        clips.
        """
        self._has_gradient = False
        optimizer, head = self.engine.optimizer, self._head
        if head is not None and not head.average_gradient():
            return math.nan
        if self.engine.zero_optimization_stage() == 3 and not _is_finite(
            optimizer.grad_partitions_flat_buffer
        ):
            return math.nan
        set_lr(optimizer, lr)
        optimizer.clip_grad = limit or 0.0
        optimizer.override_loss_scale(1.0 / grad_scale)
        try:
            self.engine.step()
        finally:
            optimizer.override_loss_scale(1.0)
        if optimizer.overflow:
            return math.nan
        norm = float(self.engine.get_global_grad_norm()) / grad_scale
        if head is not None and math.isfinite(norm):
            head.step(lr, norm)
        return norm

    def discard_gradient(self) -> None:
        """Take DeepSpeed's step with an optimizer that does nothing: gradients are freed."""
        if not self._has_gradient:
            return
        self._has_gradient = False
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

    def sync_weights(self) -> None:
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
