"""The loss tokens of a batch, grouped into the segments that share an importance ratio. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sorl_train.algorithms import RatioLevel

MAX_LOG_RATIO = 20.0  # exp(20) is about 5e8: larger than any useful ratio, and float32 can still square it


@dataclass(frozen=True)
class Segments:
    """N loss tokens of B trajectories in row-major order, in S segments: tokens, turns or whole sequences.

    Only loss tokens are kept. Padding, prompts and observations are never read, so they cost nothing and may even be
    NaN. Each segment is one stretch of the N tokens.

        loss_mask = [[0 1 1 1 0 1 1],   turn_ids = [[-1 0 0 0 -1 1 1],   positions = [1 2 3 5 6 8 9]
                     [0 1 1 0 0 0 0]]               [-1 0 0 -1 -1 -1 -1]]
        row_lengths = [5, 2]; at level turn: lengths = [3, 2, 2]
    """

    positions: Tensor  # (N,) places of the tokens in the flattened (B, T)
    row_lengths: Tensor  # (B,) loss tokens of each trajectory, |y|
    # (S,) tokens of each segment, |y^k| at level turn. At level sequence every trajectory is one segment, possibly
    # empty. None at level token, where every segment is one token
    lengths: Tensor | None

    @staticmethod
    def of(level: RatioLevel, loss_mask: Tensor, turn_ids: Tensor) -> Segments:
        """Segments of ``loss_mask`` (B, T) at ``level``; ``turn_ids`` (B, T) is read at level ``turn`` only.

        Raises ValueError if a loss token has a negative turn id, or if turn ids decrease along a trajectory.
        """
        positions = loss_mask.flatten().nonzero().squeeze(1)
        row_starts = torch.arange(len(loss_mask) + 1, device=loss_mask.device) * loss_mask.shape[1]
        row_lengths = torch.searchsorted(positions, row_starts).diff()  # a sum would copy the mask to int64
        if level == "token":
            return Segments(positions, row_lengths, None)
        lengths = row_lengths
        if level == "turn":
            lengths = _turn_lengths(turn_ids.flatten().index_select(0, positions), row_lengths)
        return Segments(positions, row_lengths, lengths)

    def pick(self, values: Tensor) -> Tensor:
        """(B, T) -> (N,): the values of the loss tokens."""
        return values.flatten().index_select(0, self.positions)

    def mean(self, values: Tensor) -> Tensor:
        """(N,) -> (S,): means over each segment's tokens, 0 for an empty segment."""
        return values if self.lengths is None else _means(values, self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        """(S,) -> (N,): each segment's value on each of its tokens."""
        return values if self.lengths is None else _spread(values, self.lengths, len(self.positions))

    def spread_mean(self, values: Tensor) -> Tensor:
        """(N,) -> (N,): on each token the mean over its segment, differentiable."""
        if self.lengths is None:
            return values
        spread_mean: Tensor = _SpreadMean.apply(values, self.lengths)
        return spread_mean

    def row_sums(self, values: Tensor) -> Tensor:
        """(N,) -> (B,): sums over each trajectory's tokens, differentiable."""
        return _sums(values, self.row_lengths)


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), of any shape, with the log-ratio clamped to +-20. Beyond the clamp the ratio has no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class _SpreadMean(torch.autograd.Function):
    """``spread(mean(values))``. It is a symmetric matrix, so its backward pass takes the same mean of the gradient. On
    a GPU autograd's own backward pass would add in an order that differs from run to run.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        return _spread(_means(values, lengths), lengths, len(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _SpreadMean.apply(gradient, *ctx.saved_tensors), None


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive stretches of ``values``; 0 for a stretch of length 0."""
    if not len(lengths):
        return values[:0]
    # unsafe skips a check that the lengths add up, which they do by construction
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _means(values: Tensor, lengths: Tensor) -> Tensor:
    return _sums(values, lengths) / lengths.clamp(min=1)


def _spread(values: Tensor, lengths: Tensor, size: int) -> Tensor:
    return torch.repeat_interleave(values, lengths, output_size=size)


def _turn_lengths(ids: Tensor, row_lengths: Tensor) -> Tensor:
    """Lengths (S,) of the turns, from the turn ids (N,) of the loss tokens."""
    row_ends = row_lengths.cumsum(0)
    first = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=first[1:])
    # a row's first turn may have the same id as the last turn of the row before
    first[(row_ends - row_lengths)[row_lengths > 0]] = True
    starts = first.nonzero().squeeze(1)  # (S,)
    row = torch.searchsorted(row_ends, starts, right=True)
    turn = ids[starts]
    falls = (turn.diff() < 0) & (row.diff() == 0)
    if bool((turn < 0).any() | falls.any()):
        at = int((turn < 0).int().argmax() if bool((turn < 0).any()) else falls.int().argmax() + 1)
        raise ValueError(
            f"turn_ids has {int(turn[at])} on a loss token of trajectory {int(row[at])}: each loss token needs the id "
            "(>= 0) of its turn, and they must not decrease along a trajectory"
        )
    return torch.diff(starts, append=starts.new_tensor([len(ids)]))
