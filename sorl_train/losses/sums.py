"""Sums over micro-batches and ranks. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
import torch.distributed as dist

SumsT = TypeVar("SumsT", bound="Sums")


@dataclass(frozen=True)
class Sums:
    """Detached 0-d tensors that add up over micro-batches (``+``) and over ranks (``all_reduce``)."""

    def __add__(self: SumsT, other: SumsT) -> SumsT:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def all_reduce(self: SumsT) -> SumsT:
        """The sums over all ranks, or these sums where torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        packed = torch.stack([getattr(self, f.name) for f in fields(self)])
        dist.all_reduce(packed)
        return type(self)(*packed.unbind())


def sum_over_ranks(*values: float) -> tuple[float, ...]:
    """Each value summed over all ranks, or the values where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return tuple(packed.tolist())
