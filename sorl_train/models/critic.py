"""The critic: a transformer with a scalar head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from sorl_train.models import packing
from sorl_train.models.attention import text_config
from sorl_train.models.forward import pick_device
from sorl_train.models.packed_attention import packs
from sorl_train.models.policy import load_weights

VALUE_HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """Gives V(s_t), the value of the state in which token t + 1 is sampled."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(text_config(backbone).hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)  # V = 0 at first: advantages are the rewards themselves
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Values of some states, in packed rows where that saves enough (``packing``).

        Args:
            token_ids: (B, L).
            mask: bool (B, T), T = L - 1: the tokens whose states are asked for.

        Returns:
            (B, T) float32, 0 off the mask.
        """
        packed = packing.pack(token_ids, mask) if packs(self.backbone) else None
        if packed is None:
            inputs = {"input_ids": token_ids[:, :-1], "use_cache": False}
        else:
            inputs = packing.inputs(packed)
        hidden = self.backbone(**inputs).last_hidden_state
        # the 8 bits of bfloat16 are too coarse for values
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.head(hidden.float()).squeeze(-1)
        return torch.where(mask, values if packed is None else values[0][packed.where], 0.0)

    def save(self, folder: Path) -> None:
        """Write a plain transformers folder with the head beside it."""
        self.backbone.save_pretrained(folder)
        head = {name: value.detach().cpu().contiguous() for name, value in self.head.state_dict().items()}
        save_file(head, folder / VALUE_HEAD_FILE)


def load_critic(folder: str, device: str = "auto", *, gradient_checkpointing: bool = False) -> Critic:
    """Load what ``Critic.save`` wrote, or put a new head on the backbone of any language model."""
    target = pick_device(device)
    critic = Critic(load_weights(AutoModel, "critic", folder))
    head = Path(folder) / VALUE_HEAD_FILE
    if head.is_file():
        critic.head.load_state_dict(load_file(head))
    if gradient_checkpointing:
        critic.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    return critic.to(target)
