"""The sizes of a model, counted without allocating a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sorl_env.errors import UserError
from sorl_train.models.policy import LOADING_ERRORS, loading_failed


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    Attributes:
        parameters, backbone_parameters: with and without the output layer.
        trained: parameters that have a gradient: those of LoRA, or all.
        heads, key_value_heads: of the attention. Tensor parallelism cuts a model between them.
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
    heads: int = 1

    @property
    def critic_parameters(self) -> int:
        """Of a ``Critic`` with this backbone: its head has a weight for each hidden unit, and a bias."""
        return self.backbone_parameters + self.hidden + 1

    @property
    def block_width(self) -> int:
        """Elements that one block keeps for each token, for the backward pass."""
        return 12 * self.hidden + 4 * self.intermediate

    @property
    def scoring_width(self) -> int:
        """Elements that a forward pass without gradients needs at once for each token."""
        return 4 * self.hidden + 3 * self.intermediate


def model_shape(folder: str, lora_rank: int = 0) -> ModelShape:
    """The sizes of the model in a folder, from its configuration alone.

    The model is built on torch's meta device, where tensors have a shape and no storage.

    Raises:
        UserError: the folder has no configuration that can be read.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(config)
            backbone = AutoModel.from_config(config)
    except LOADING_ERRORS as error:
        raise UserError(loading_failed("model configuration", folder, error)) from error
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = sum(p.numel() for p in policy.parameters())
    output = policy.get_output_embeddings()
    linear = [module for module in policy.modules() if isinstance(module, nn.Linear) and module is not output]
    adapters = sum(lora_rank * (layer.in_features + layer.out_features) for layer in linear)
    return ModelShape(
        parameters=parameters,
        backbone_parameters=sum(p.numel() for p in backbone.parameters()),
        trained=adapters if lora_rank else parameters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_value_width=heads * head_dim,
        vocabulary=config.vocab_size,
        key_value_heads=heads,
        heads=config.num_attention_heads,
    )
