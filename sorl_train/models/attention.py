"""Which earlier tokens each layer of a model attends to, and how far its positions reach, read from its config.

The sampler's cache needs this to hide the same keys as the model's own masks do. Whether the reading is right is
``model_check``'s to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sorl_env.errors import UserError

# A layer's kind in ``config.layer_types``, and the setting that holds its span in tokens.
SPANS: dict[str, str | None] = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
# Rotary embeddings that change for the whole sequence once it is longer than what the model was first trained on.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def text_config(model: Any) -> Any:
    """The config of the language model, which is a part of the config of a model that also reads images."""
    return model.config.get_text_config(decoder=True)


def model_name(model: Any) -> str:
    """How messages name a model: its class, and its type in transformers."""
    return f"{type(model).__name__} (model type {model.config.model_type})"


@dataclass(frozen=True)
class AttentionMasks:
    """Makes the masks of a model whose rows have cached sequences of different lengths.

    Attributes:
        spans: kind of layer to its span in tokens (None: everything before).
        by_layer: the model takes one mask for each kind, in a dict; otherwise one mask for all layers.
    """

    spans: dict[str, int | None]
    by_layer: bool

    @classmethod
    def of(cls, model: Any) -> AttentionMasks:
        """Read the config of ``model``.

        Raises:
            UserError: some layers keep a state other than keys and values, which the sampler's cache cannot hold.
        """
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
        if not kinds:  # one kind for all layers
            kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        settings = {kind: SPANS[kind] for kind in kinds}
        return cls(
            {kind: getattr(config, name) if name else None for kind, name in settings.items()}, by_layer
        )

    def make(self, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """What the model takes as ``attention_mask``: masks (b, 1, n, width) to add to the attention scores.

        Args:
            positions: (b, n) position of each new token in its row; the key in column c has position c.
        """
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
    """Around forward passes: spans of attention above ``tokens`` are ``tokens``, so that a short sequence is longer
    than all of them. transformers makes its masks from the config in every pass."""
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
    """Refuse sequences of ``max_tokens`` where the model's positions do not reach that far.

    Raises:
        UserError: it has fewer learned positions, or its rotary embedding changes with the sequence's length.
    """
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
            f"so that keys in a cache, and shorter rows of a batch, would no longer be right. A trajectory may have "
            f"{max_tokens} tokens: {advice}"
        )


def position_table(model: Any) -> int | None:
    """How many positions a model with learned position embeddings has; None for any other."""
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    words = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    # some keep the first two for padding
    return limit if any(limit <= table.num_embeddings <= limit + 2 for table in tables) else None


def _length_limit(config: Any) -> int | None:
    """Tokens up to which what a model computes of a token does not depend on the length of the sequence."""
    limits = []
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 counts from the longest row of the cache on, and scales its queries from ``floor_scale`` tokens on
        limits.append(int(config.floor_scale) // 2)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer or [rope]:
        if parameters.get("rope_type", parameters.get("type")) in LENGTH_DEPENDENT_ROPE:
            name = "original_max_position_embeddings"
            first = parameters.get(name) or getattr(config, name, None) or config.max_position_embeddings
            limits.append(int(first))
    return min(limits, default=None)
