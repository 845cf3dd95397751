"""Sums over ranks. Pure torch."""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_over_ranks(*values: float) -> tuple[float, ...]:
    """Each value summed over all ranks, or the values where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return tuple(packed.tolist())
