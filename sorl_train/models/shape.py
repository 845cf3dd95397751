"""Sizes of a model, counted without allocating a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sorl_env.errors import UserError
from sorl_train.models.policy import LOADING_ERRORS


def model_shape(folder: str, lora_rank: int = 0) -> ModelShape:
    """Sizes of the model in a folder, counted on the meta device, where tensors have a shape and no storage."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(config)
            backbone = AutoModel.from_config(config)
    except LOADING_ERRORS as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"no model configuration could be read from {folder!r}: {first_line}") from error
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = sum(p.numel() for p in policy.parameters())
    return ModelShape(
        parameters=parameters,
        backbone_parameters=sum(p.numel() for p in backbone.parameters()),
        trained=_lora_parameters(policy, lora_rank) if lora_rank else parameters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_value_width=heads * head_dim,
        vocabulary=config.vocab_size,
        key_value_heads=heads,
    )


def _lora_parameters(policy: Any, rank: int) -> int:
    """Adapters of every linear layer but the output projection."""
    output = policy.get_output_embeddings()
    linear = [module for module in policy.modules() if isinstance(module, nn.Linear) and module is not output]
    return sum(rank * (layer.in_features + layer.out_features) for layer in linear)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    ``trained`` counts the parameters with a gradient (LoRA's, or all); ``key_value_heads`` says in how many parts
    tensor parallelism can cut ``key_value_width``.
    """

    parameters: int
    backbone_parameters: int
    trained: int
    layers: int
    hidden: int
    intermediate: int
    key_value_width: int
    vocabulary: int
    key_value_heads: int = 1


def block_width(shape: ModelShape) -> int:
    """Numbers that a token leaves behind in one block."""
    return 12 * shape.hidden + 4 * shape.intermediate


def scoring_width(shape: ModelShape) -> int:
    """Numbers that a token needs at once in a forward pass without gradients."""
    return 4 * shape.hidden + 3 * shape.intermediate
