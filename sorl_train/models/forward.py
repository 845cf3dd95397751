"""Forward passes: on which device, in which precision, and the log-probabilities of the policy's tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sorl_env.errors import UserError
from sorl_train.config.checks import check_device
from sorl_train.config.settings import ModelConfig
from sorl_train.losses.log_probs import TokenStats, token_log_probs


def pick_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name}: torch sees no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Forward passes in the compute dtype. Weights stay in float32: at a learning rate of 1e-6 an update is lost in
    the 8 bits of bfloat16."""
    dtype = compute_dtype(config, device)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def disable_dropout(model: nn.Module) -> None:
    """From now on the model computes in training what it computes in sampling: a ratio of the two is to tell how far
    the weights have moved, and nothing else."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # rates of functional dropout, noise at a router's input
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def action_stats(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_scale: bool = False,
) -> TokenStats:
    """Log-probabilities (and entropy, logit scale) of the masked tokens, as (B, T) with zeros elsewhere.

    Only the masked positions go through the vocabulary projection: observations and padding cost no logits. There is
    no attention mask because padding is on the right, where causal attention never looks.

    Args:
        token_ids: (B, L). mask: bool (B, T), T = L - 1.
    """
    logits = picked_logits(  # (N, V)
        model, lambda hidden: hidden[mask], {"input_ids": token_ids[:, :-1], "use_cache": False}
    )
    return logit_stats(
        logits, token_ids, mask, temperature=temperature, entropy=entropy, logit_scale=logit_scale
    )


def picked_logits(model: Any, pick: Callable[[Tensor], Tensor], inputs: dict[str, Any]) -> Tensor:
    """Logits (N, V) of the positions that ``pick`` takes out of the last hidden states: (B, L, H) -> (N, H).

    It is the model's own forward pass, with the hidden states of the other positions dropped before its output layer:
    whatever a model does to its logits (Granite divides them, Gemma 2 caps them) is done, and no others are computed.

    Args:
        inputs: the arguments of the model's forward pass.
    """

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return pick(args[0])[None], *args[1:]

    hook = model.get_output_embeddings().register_forward_pre_hook(narrow)
    try:
        logits: Tensor = model(**inputs, return_dict=True).logits[0]
    finally:
        hook.remove()
    return logits


def logit_stats(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_scale: bool = False,
) -> TokenStats:
    """As ``action_stats``, from the logits (N, V) of the N masked positions."""
    targets = token_ids[:, 1:][mask]  # (N,)
    stats = token_log_probs(
        logits[None], targets[None], temperature=temperature, entropy=entropy, logit_scale=logit_scale
    )

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
            mask, values[0]
        )

    log_probs = spread(stats.log_probs)
    assert log_probs is not None
    return TokenStats(
        log_probs=log_probs, entropy=spread(stats.entropy), logit_scale=spread(stats.logit_scale)
    )
