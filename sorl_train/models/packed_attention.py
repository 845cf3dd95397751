"""The attention of a policy, registered with transformers: of packed rows, of decoding steps, and of all else.

Torch's fast attention is slow on a CPU where a group of heads shares its keys, and where there is one query. Both are
written in a faster way here; what they compute is the same up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sorl_train.models.packing import Block, Packed

PACKED = "sorl_packed"  # the name of the attention, in ``model.config._attn_implementation``
# What the attentions written here know of; a window is in the mask already.
PLAIN = {"dropout", "scaling", "sliding_window", "position_ids", "use_cache"}


def packs(model: Any) -> bool:
    """Whether ``enable_packing`` was called on the model."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED


def enable_packing(model: Any) -> None:
    """Give a model that has torch's fast attention this one, which takes packed rows, too."""
    model.set_attn_implementation(PACKED)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention that transformers calls in each layer: (b, heads, n, d) to (b, n, heads, d).

    With ``packed``, b is 1, and the n tokens are those of all branches. Without, it computes what torch's does. Raises
    ``TypeError`` for packed rows and an attention with more than scores, a window and a scale.
    """
    if packed is None:
        is_plain = kwargs.keys() <= PLAIN and not kwargs.get("dropout")
        if is_plain and attention_mask is not None and attention_mask.shape[1] == 1:
            scaling = kwargs.get("scaling")
            if _is_decoding(query, attention_mask):
                return _one_token(query, key, value, attention_mask, scaling).transpose(1, 2), None
            if query.shape[1] > key.shape[1]:
                output = _shared_heads(query, key, value, attention_mask, scaling)
                return output.transpose(1, 2).contiguous(), None
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return found
    unknown = [name for name, value in kwargs.items() if name not in PLAIN and value is not None]
    # such as the cap of Gemma 2's scores, which packed rows would do without
    if unknown or kwargs.get("dropout"):
        raise TypeError(f"packed rows know no attention with {', '.join(unknown) or 'dropout'}")
    outputs = [
        _attend(
            block, query, key, value, packed.positions[0], kwargs.get("sliding_window"), kwargs.get("scaling")
        )
        for block in packed.blocks
    ]
    restored = torch.cat(outputs).index_select(0, packed.restore)
    return restored[None].contiguous(), None


def _attend(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Attention of one block's rows: (1, heads, N, d) to (R * W, heads, d)."""
    rows, width = block.queries.shape

    def pick(tensor: Tensor, index: Tensor) -> Tensor:
        """(1, heads, N, d) -> (R, heads, columns, d)."""
        chosen = tensor[0].index_select(1, index.flatten())
        return chosen.view(len(chosen), rows, -1, tensor.shape[-1]).transpose(0, 1)

    queries, keys, values = pick(query, block.queries), pick(key, block.keys), pick(value, block.keys)
    mask = block.mask
    if window is not None:
        near = positions[block.keys][:, None, None] > positions[block.queries][:, None, :, None] - window
        if mask is None:
            mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
        mask = mask & near
    if mask is None:
        shared = query.shape[1] // key.shape[1]
        keys, values = (tensor.repeat_interleave(shared, dim=1) for tensor in (keys, values))
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
    else:
        output = _shared_heads(queries, keys, values, mask, scaling)
    return output.transpose(1, 2).flatten(0, 1)


def _shared_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention (b, heads, n, d) under a mask (b, 1, n, w), where several heads of queries may share one of keys.

    Heads that share their keys become more queries of one head. So keys are not copied for each, and torch's kernel for
    CPUs is faster on more queries at a time.
    """
    rows, heads, width, _ = query.shape
    shared = heads // key.shape[1]
    queries = query.reshape(rows, heads // shared, shared * width, -1)
    output = scaled_dot_product_attention(
        queries, key, value, attn_mask=mask.repeat(1, 1, shared, 1), scale=scaling
    )
    return output.reshape(rows, heads, width, -1)


def _is_decoding(query: Tensor, mask: Tensor) -> bool:
    """Whether it is a decoding step on a CPU: one new token in each row, a mask to be added, no gradient."""
    one = query.shape[2] == 1 and query.device.type == "cpu"
    return one and mask.is_floating_point() and not torch.is_grad_enabled()


def _one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention of one token in each row: (b, heads, 1, d), under a mask (b, 1, 1, w).

    Written out, because torch's kernel for CPUs takes up to three times as long for one query. As there, scores are in
    float32, which autocast would round.
    """
    rows, heads, _, depth = query.shape
    queries = query.reshape(rows, key.shape[1], -1, depth).float()
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(queries * (scaling or depth**-0.5), key.float().transpose(2, 3)) + mask
        output = torch.matmul(torch.softmax(scores, -1).to(value.dtype), value)
    return output.reshape(rows, heads, 1, -1)


AttentionInterface.register(PACKED, attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
