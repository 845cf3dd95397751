"""Our updates on a DeepSpeed engine with ZeRO stage 2 or 3, and the value head beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_env.errors import UserError
from sorl_train.config.settings import OptimConfig
from sorl_train.learner.backend import set_lr
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import adamw, load_optimizers, save_optimizers
from sorl_train.losses.log_probs import TokenStats
from sorl_train.losses.terms import sum_over_ranks
from sorl_train.models.forward import logit_stats
from sorl_train.models.policy import VALUE_HEAD_FILE

PIECE = 1 << 24  # elements of a gradient that are looked at together
OPTIMIZER_FILE = "value_head_optimizer.safetensors"


class ValueHead:
    """The critic's output layer in float32, beside a DeepSpeed engine that holds the rest of the critic in bfloat16.

    ZeRO flattens all parameters of a module into buffers of one dtype, and the 8 bits of bfloat16 are too few for
    values: near 0.7 two neighbours differ by 0.004, as much as an advantage late in training. So each rank keeps all of
    this layer, with its own AdamW. Its gradient is averaged over the ranks, and clipped by the norm of all gradients of
    the critic, of which DeepSpeed's ``engine`` reports the norm with the head's included: the update is that of the
    local engine. Values are 0 until the head is trained or loaded.
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


class DeepSpeedBackend:
    """``Backend`` of a DeepSpeed engine, which gathers sharded weights, averages over ranks, clips and steps.

    Args:
        engine: around a causal language model, or around OpenRLHF's critic, whose outputs ``head`` reads.
    """

    always_backward = True  # all ranks have to go through the backward pass together
    uses_packing = False

    def __init__(self, engine: Any, *, temperature: float = 1.0, head: ValueHead | None = None) -> None:
        self.engine = engine
        self.model = engine.module
        self.parameters: Sequence[nn.Parameter] = list(engine.module.parameters())
        self.device: torch.device = engine.device  # not that of offloaded weights
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
        """As ``Backend.backward``, of a scalar. DeepSpeed would count micro-batches; a mini-batch may have fewer."""
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
        """This rank's shard of the weights that the optimizer steps on: float32, each (N,)."""
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
