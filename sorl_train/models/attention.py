"""Which earlier tokens each layer of a model attends to, and how far its positions reach, as its config says.

With this the sampler's cache hides the same keys as the model's own masks. ``rollout/model_check.py`` tests the result
against the model itself. ``decoding_model`` is the copy of a model that the sampler decodes with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sorl_env.errors import UserError

# Kinds of layers in ``config.layer_types``, each with the setting that holds its span in tokens.
SPANS: dict[str, str | None] = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
# Rotary embeddings that change all positions once the sequence is longer than the model was first trained on.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def text_config(model: Any) -> Any:
    """The config of the language model alone, also for a model that reads images."""
    return model.config.get_text_config(decoder=True)


def model_name(model: Any) -> str:
    """The name of a model in messages: its class, and its type in transformers."""
    return f"{type(model).__name__} (model type {model.config.model_type})"


@dataclass(frozen=True)
class AttentionMasks:
    """Makes the attention masks for rows whose cached sequences have different lengths. ``spans`` has, for each kind of
    layer, how many tokens it looks back; None: all. ``by_layer`` models take a dict with a mask for each kind, rather
    than one mask for all layers."""

    spans: dict[str, int | None]
    by_layer: bool

    @classmethod
    def of(cls, model: Any) -> AttentionMasks:
        """Read the config of ``model``. Raises ``UserError`` if some layers keep another state than keys and values,
        which the sampler's cache cannot hold."""
        config = text_config(model)
        kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
        unknown = [kind for kind in kinds if kind not in SPANS]
        if unknown or getattr(model, "_is_stateful", False):
            what = f"layers of type {unknown[0]}" if unknown else "recurrent layers"
            raise UserError(
                f"{model_name(model)} has {what}: they keep a state that the cache of sampler.backend=transformers "
                f"cannot hold. {OTHER_SAMPLER}"
            )
        by_layer = any(kind != "full_attention" for kind in kinds)
        if not kinds:  # all layers are of one kind
            kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        settings = {kind: SPANS[kind] for kind in kinds}
        return cls(
            {kind: getattr(config, name) if name else None for kind, name in settings.items()}, by_layer
        )

    def make(self, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """The model's ``attention_mask``: (b, 1, n, width), to be added to the attention scores. ``positions`` (b, n)
        are those of each new token in its row; the key in column c has position c."""
        masks = {kind: self._mask(kind, positions[:, None, :, None], width, dtype) for kind in self.spans}
        return masks if self.by_layer else next(iter(masks.values()))

    def _mask(self, kind: str, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        keys = torch.arange(width, device=positions.device)
        hidden = keys > positions
        span = self.spans[kind]
        if span is not None:
            is_chunk = kind == "chunked_attention"
            hidden |= (keys // span != positions // span) if is_chunk else (keys <= positions - span)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        return mask.masked_fill_(hidden, -torch.inf)


OTHER_SAMPLER = (
    "Use sampler.backend=vllm for training, and for sorl-eval, sorl-ask and sorl-serve-agent a server "
    "(--endpoint), or another model"
)


@contextmanager
def short_spans(model: Any, tokens: int) -> Iterator[None]:
    """Around forward passes: shorten all spans of attention to ``tokens``, so that short sequences exceed them. This
    works because transformers makes its masks from the config in every pass."""
    config = text_config(model)
    names = [name for name in SPANS.values() if name and (getattr(config, name, None) or 0) > tokens]
    before = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, tokens)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def check_length(model: Any, max_tokens: int) -> None:
    """Raise ``UserError`` if the model has fewer learned positions than ``max_tokens``, or if its rotary embedding
    changes with a sequence of that length."""
    config = text_config(model)
    advice = "set limits.max_trajectory_tokens to at most that (sorl-eval: --limits max_trajectory_tokens=N)"
    table = position_table(model)
    if table is not None and max_tokens > table:
        raise UserError(
            f"{model_name(model)} has {table} positions, and a trajectory may have {max_tokens} tokens: {advice}"
        )
    limit = _length_limit(config)
    if limit is not None and max_tokens > limit:
        raise UserError(
            f"{model_name(model)} computes all positions in another way once a sequence has more than {limit} tokens, "
            f"which makes cached keys and the shorter rows of a batch wrong. A trajectory may have {max_tokens} "
            f"tokens: {advice}"
        )


def position_table(model: Any) -> int | None:
    """The number of learned position embeddings of a model; None if it has none."""
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    words = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    # some models reserve two more for padding
    return limit if any(limit <= table.num_embeddings <= limit + 2 for table in tables) else None


def _length_limit(config: Any) -> int | None:
    """The longest sequence whose length does not change what the model computes for a token; None: any length."""
    limits = []
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 counts positions from the longest row of the cache, and scales queries from ``floor_scale`` on
        limits.append(int(config.floor_scale) // 2)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer or [rope]:
        if parameters.get("rope_type", parameters.get("type")) in LENGTH_DEPENDENT_ROPE:
            name = "original_max_position_embeddings"
            first = parameters.get(name) or getattr(config, name, None) or config.max_position_embeddings
            limits.append(int(first))
    return min(limits, default=None)


# A matrix of fewer entries stays as it is: torch multiplies it faster than it looks up a packed one.
LARGE = 1 << 16


def decoding_model(model: Any, dtype: torch.dtype) -> Any:
    """The model for many small forward passes under ``autocast``, with the weights of now; it cannot be trained. In
    each product torch rearranges a matrix for the processor, and autocast casts it before. With few rows that takes as
    long as the product itself, so both are done once for each matrix before a batch of rollouts. Sums are rounded
    differently, as they are between batches of different sizes; in bfloat16 only on processors that emulate it. Where
    there is nothing to prepare it is the model itself."""
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
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)

    def product(inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), weight, bias, "none", [], "")
        return output

    return product
