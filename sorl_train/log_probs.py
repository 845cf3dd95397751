"""Log-probabilities, entropy and the logit scale of sampled tokens, from logits in chunks. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32 at a time


@dataclass(frozen=True)
class TokenStats:
    """(B, T) each, float32 (float64 for float64 logits). ``entropy`` and ``logit_scale`` are None unless asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    logit_scale: Tensor | None


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool, scale: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.shape[0]
        log_probs = torch.empty(rows, dtype=dtype, device=logits.device)
        log_z, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs)
        scales = torch.empty_like(log_probs)
        for i in range(0, rows, chunk):
            part = slice(i, i + chunk)
            x = logits[part].to(dtype) / temperature
            log_z[part] = x.logsumexp(dim=1)
            log_probs[part] = x.gather(1, targets[part, None]).squeeze(1) - log_z[part]
            if entropy or scale:
                p = (x - log_z[part, None]).exp_()
                if entropy:
                    entropies[part] = log_z[part] - (p * x.masked_fill(p == 0, 0.0)).sum(dim=1)
                if scale:
                    squared = 1.0 - 2.0 * log_probs[part].exp() + p.square().sum(dim=1)
                    scales[part] = squared.clamp(min=0.0).sqrt()
        ctx.save_for_backward(logits, targets, log_z, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(scales)
        ctx.set_materialize_grads(False)
        return log_probs, entropies, scales

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_lp: Tensor | None, grad_h: Tensor | None, _: Tensor | None
    ) -> tuple[Any, ...]:
        logits, targets, log_z, entropies = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for i in range(0, logits.shape[0], ctx.chunk):
            part = slice(i, i + ctx.chunk)
            log_p = logits[part].to(log_z.dtype) / ctx.temperature - log_z[part, None]
            p = log_p.exp()
            g = torch.zeros_like(p)
            if grad_lp is not None:
                g -= p * grad_lp[part, None]
                g.scatter_add_(1, targets[part, None], grad_lp[part, None])
            if grad_h is not None:
                log_p.masked_fill_(p == 0, 0.0)
                g -= p * (log_p + entropies[part, None]) * grad_h[part, None]
            grad[part] = g / ctx.temperature
        return grad, None, None, None, None, None


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    logit_scale: bool = False,
) -> TokenStats:
    """Log-probability of each target under softmax(logits / temperature), without a float32 copy of the logits."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    shape, vocabulary = targets.shape, logits.shape[-1]
    chunk = chunk_size or max(1, CHUNK_ELEMENTS // vocabulary)
    log_probs, entropies, scales = _TokenStats.apply(
        logits.reshape(-1, vocabulary), targets.reshape(-1), temperature, chunk, entropy, logit_scale
    )
    return TokenStats(
        log_probs.view(shape),
        entropies.view(shape) if entropy else None,
        scales.view(shape) if logit_scale else None,
    )
