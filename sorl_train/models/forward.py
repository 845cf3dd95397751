"""Forward passes: the device, the precision, and the log-probabilities of the policy's tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sorl_env.errors import UserError
from sorl_train.config.run_settings import check_device
from sorl_train.losses.log_probs import TokenStats, token_log_probs
from sorl_train.models import packing


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU if there is one. Raises ``UserError`` if torch does not see it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(check_device(name))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name}: torch sees no GPU; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision of forward passes; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """Around forward passes: compute in ``compute_dtype(dtype, device)``. The weights stay in float32: bfloat16 has 8
    bits, which lose an update at a learning rate of 1e-6."""
    computed = compute_dtype(dtype, device)
    return nullcontext() if computed == torch.float32 else torch.autocast(device.type, dtype=computed)


def disable_dropout(model: nn.Module) -> None:
    """Switch off all dropout and noise, for good: training then computes what sampling computes, so that a ratio of the
    two shows how far the weights have moved and nothing else."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # rates of functional dropout, noise in front of a router
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def action_stats(model: Any, token_ids: Tensor, mask: Tensor, **wanted: Any) -> TokenStats:
    """Log-probabilities (and what else is ``wanted``) of the masked tokens: (B, T), zero elsewhere. Only the masked
    positions pass the output layer, so observations and padding cost no logits. Rows are packed where that saves a
    tenth of the tokens or more (``packing``). Padded rows need no attention mask: padding is on the right, and causal
    attention does not look there. ``token_ids`` is (B, L), the bool ``mask`` (B, T), T = L - 1. ``wanted`` are
    ``temperature``, ``entropy`` and ``logit_scale`` of ``token_log_probs``."""
    packed = packing.pack(token_ids, mask) if packing.uses_packing(model) else None
    if packed is None:
        inputs = {"input_ids": token_ids[:, :-1], "use_cache": False}
        logits = logits_at(model, lambda hidden: hidden[mask], inputs)  # (N, V)
    else:
        places = packed.where[mask]
        logits = logits_at(model, lambda hidden: hidden[0][places], packing.inputs(packed))
    return logit_stats(logits, token_ids, mask, **wanted)


def logits_at(model: Any, pick: Callable[[Tensor], Tensor], inputs: dict[str, Any]) -> Tensor:
    """Logits (N, V) of some positions, from the model's own forward pass. The hidden states of all other positions are
    dropped in front of the output layer. Whatever a model does to its logits (Granite divides them, Gemma 2 caps them)
    is done as usual. ``pick`` chooses from the last hidden states: (B, L, H) -> (N, H). ``inputs`` are those of the
    forward pass."""

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return pick(args[0])[None], *args[1:]

    hook = model.get_output_embeddings().register_forward_pre_hook(narrow)
    try:
        logits: Tensor = model(**inputs, return_dict=True).logits[0]
    finally:
        hook.remove()
    return logits


def logit_stats(logits: Tensor, token_ids: Tensor, mask: Tensor, **wanted: Any) -> TokenStats:
    """The same as ``action_stats``, from the logits (N, V) of the N masked positions."""
    targets = token_ids[:, 1:][mask]  # (N,)
    stats = token_log_probs(logits[None], targets[None], **wanted)

    def spread(values: Tensor) -> Tensor:
        zeros = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return zeros.masked_scatter(mask, values[0])

    return TokenStats(
        log_probs=spread(stats.log_probs),
        entropy=None if stats.entropy is None else spread(stats.entropy),
        logit_scale=None if stats.logit_scale is None else spread(stats.logit_scale),
    )
