"""A copy of a model whose matrices are prepared once for many small forward passes, such as decoding steps.

In each product torch rearranges a matrix for the processor, and autocast casts it before. With few rows that takes as
long as the product itself. So before a batch of rollouts both are done once, for each matrix, and the result is dropped
after it. Training has no use for this: the weights change with each step, and its passes have many rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# A matrix of fewer entries stays as it is: torch multiplies it faster than it looks up a packed one.
LARGE = 1 << 16


def decoding_model(model: Any, dtype: torch.dtype) -> Any:
    """The model for many small forward passes under ``autocast``, with the weights of now; it cannot be trained.

    In bfloat16 it computes the same bits as the model. In float32 sums are rounded differently, as they are between
    batches of different sizes. Where there is nothing to prepare it is the model itself.
    """
    packs = _packs(next(model.parameters()).device, dtype)
    if dtype == torch.float32 and not (packs and any(map(_is_packed, model.modules()))):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        if packs and _is_packed(module):
            module.forward = _packed_product(module, dtype)
        elif dtype != torch.float32 and isinstance(module, nn.Linear | Conv1D):
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
    return copied


def _is_packed(module: nn.Module) -> bool:
    """Whether it is a linear layer to pack; a subclass may be one with adapters."""
    return (
        type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.numel() >= LARGE
    )


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed matrices of this type here: on Intel's and AMD's processors."""
    operators = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        # torch's compiler uses both, but they are not part of its documented interface
        and all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and (dtype == torch.float32 or operators._is_mkldnn_bf16_supported())
    )


@torch.no_grad()
def _packed_product(layer: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What a linear layer computes in ``dtype``, with its matrix packed."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def product(inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), weight, bias, "none", [], "")
        return output

    return product
