"""The critic: a transformer with a scalar head, and how it is saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from sorl_train.config.settings import ModelConfig
from sorl_train.models.attention import text_config
from sorl_train.models.forward import pick_device
from sorl_train.models.policy import _load_weights

VALUE_HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """A transformer with a scalar head: V(s_t), the value of the state in which token t + 1 is drawn."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(text_config(backbone).hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)  # starts at V = 0: the first advantages are the rewards themselves
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids (B, L) -> float32 values (B, T), T = L - 1."""
        hidden = self.backbone(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # values of 8 bits would be too coarse
            return self.head(hidden.float()).squeeze(-1)

    def save(self, folder: Path) -> None:
        """A plain transformers folder and the head beside it."""
        self.backbone.save_pretrained(folder)
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in self.head.state_dict().items()},
            folder / VALUE_HEAD_FILE,
        )


def load_critic(folder: str, config: ModelConfig) -> Critic:
    """A critic from a folder written by ``Critic.save``, or a fresh head on any language model's backbone."""
    device = pick_device(config.device)
    critic = Critic(_load_weights(AutoModel, "critic", folder))
    head = Path(folder) / VALUE_HEAD_FILE
    if head.is_file():
        critic.head.load_state_dict(load_file(head))
    if config.gradient_checkpointing:
        critic.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    return critic.to(device)
