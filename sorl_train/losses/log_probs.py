"""Log-probabilities, entropy and the logit scale of sampled tokens, from logits in chunks. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_CHUNK = 1 << 19  # logits at a time: 2 MiB of float32 fit into the cache. Up to four chunks are held
GPU_CHUNK = 1 << 24  # 64 MiB: kernels long enough to hide their launch


@dataclass(frozen=True)
class TokenStats:
    """Statistics of each scored position, shaped as the targets; float32, or float64 for float64 logits.

    Log-probability and entropy carry a gradient. What was not asked for is None.
    """

    log_probs: Tensor  # log p(target)
    entropy: Tensor | None  # -sum p log p, in nats
    # ||d log p(target) / d logits||_2 = sqrt(1 - 2 p(target) + sum p^2), for logits after the temperature: what the
    # ``logit`` norm of the clipping bias weights a token by
    logit_scale: Tensor | None


def _log_softmax(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = logits.to(dtype)
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=1)


def _finite(log_p: Tensor) -> Tensor:
    """Clamp log p in place, so that p log p is 0 and not NaN for a logit of -inf. Where p > 0, log p is above -800."""
    return log_p.clamp_(min=-1e4)


class _TokenStats(torch.autograd.Function):
    """Saves only the logits as they came, and computes the softmax again in the backward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool, scale: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.empty(len(logits), dtype=dtype, device=logits.device)
        entropies = torch.empty_like(log_probs) if entropy else None
        scales = torch.empty_like(log_probs) if scale else None
        for start in range(0, len(logits), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(logits[part], temperature, dtype)  # (chunk, V)
            log_probs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            if entropies is not None or scales is not None:
                p = log_p.exp()
                if entropies is not None:
                    entropies[part] = torch.linalg.vecdot(p, _finite(log_p)).neg_()
                if scales is not None:
                    squared = 1.0 - 2.0 * log_probs[part].exp() + torch.linalg.vecdot(p, p)
                    scales[part] = squared.clamp_(min=0.0).sqrt_()
        ctx.save_for_backward(logits, targets, entropies)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, dtype
        if scales is not None:
            ctx.mark_non_differentiable(scales)
        ctx.set_materialize_grads(False)
        return log_probs, entropies, scales

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: Any
    ) -> tuple[Any, ...]:
        """d log p(y) / d logits = onehot(y) - p;  d H / d logits = -p (log p + H);  both over the temperature."""
        if grad_log_probs is None:
            assert grad_entropy is not None  # one of the two brought us here
            grad_log_probs = torch.zeros_like(grad_entropy)
        logits, targets, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            on_target = grad_log_probs[part, None]
            g = _log_softmax(logits[part], ctx.temperature, ctx.dtype)
            if grad_entropy is None:
                g.exp_().mul_(on_target)
            else:
                p = g.exp()
                g = _finite(g).add_(entropies[part, None]).mul_(grad_entropy[part, None])
                g = g.add_(on_target).mul_(p)
            g.neg_().scatter_add_(1, targets[part, None], on_target)
            gradient[part] = g.div_(ctx.temperature)
        return gradient, None, None, None, None, None


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_scale: bool = False,
) -> TokenStats:
    """Statistics of each target under softmax(logits / temperature), without a float32 copy of the logits.

    ``logits`` are (B, T, V), or of any leading shape; a view that is not contiguous, such as ``logits[:, :-1]``, is
    copied first. ``targets`` (B, T) are int64. The temperature is that of the sampler, so that ratios compare the
    distributions that tokens are drawn from. Raises ValueError if shapes do not match, or if it is not positive.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}, logits {tuple(logits.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    vocabulary = logits.shape[-1]
    limit = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    chunk = max(1, limit // vocabulary)  # positions at a time
    log_probs, entropies, scales = _TokenStats.apply(
        logits.reshape(-1, vocabulary), targets.reshape(-1), temperature, chunk, entropy, logit_scale
    )
    shape = targets.shape
    return TokenStats(
        log_probs.view(shape),
        None if entropies is None else entropies.view(shape),
        None if scales is None else scales.view(shape),
    )
