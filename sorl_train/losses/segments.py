"""The loss tokens of a batch, cut into the stretches that share an importance ratio. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sorl_train.algorithms import RatioLevel


@dataclass(frozen=True)
class Segments:
    """N loss tokens of B trajectories in row-major order, in S segments: tokens, turns or whole sequences.

    Only loss tokens are kept, so that padding, prompts and observations cost nothing and may hold anything, NaN
    included; and each segment is then one stretch, so that its sum needs no scatter.

        loss_mask = [[0 1 1 1 0 1 1],   turn_ids = [[-1 0 0 0 -1 1 1],   positions = [1 2 3 5 6 8 9]
                     [0 1 1 0 0 0 0]]               [-1 0 0 -1 -1 -1 -1]]
        row_lengths = [5, 2]; at level turn: lengths = [3, 2, 2], index = [0 0 0 1 1 2 2], per_row = [2, 1]

    Attributes:
        shape: (B, T).
        positions: (N,) where the tokens lie in the flattened (B, T).
        row_lengths: (B,) loss tokens of each trajectory, |y|.
        lengths: (S,) tokens of each segment, |y^k| at level turn; None at level token, where each has one.
        index: (N,) number of each token's segment; None at level token.
        per_row: (B,) segments of each trajectory; None at level sequence, where each has one, if an empty one.
    """

    shape: torch.Size
    positions: Tensor
    row_lengths: Tensor
    lengths: Tensor | None
    index: Tensor | None
    per_row: Tensor | None

    @staticmethod
    def of(level: RatioLevel, loss_mask: Tensor, turn_ids: Tensor) -> Segments:
        """Segments of ``loss_mask`` (B, T) at ``level``; ``turn_ids`` (B, T) is read at level ``turn`` only."""
        positions = loss_mask.flatten().nonzero().squeeze(1)
        row_starts = torch.arange(len(loss_mask) + 1, device=loss_mask.device) * loss_mask.shape[1]
        row_lengths = torch.searchsorted(positions, row_starts).diff()  # a sum would copy the mask to int64
        if level == "token":
            return Segments(loss_mask.shape, positions, row_lengths, None, None, row_lengths)
        lengths, per_row = row_lengths, None
        if level == "turn":
            lengths, per_row = _turns(turn_ids.flatten().index_select(0, positions), row_lengths)
        index = torch.repeat_interleave(lengths, output_size=len(positions))
        return Segments(loss_mask.shape, positions, row_lengths, lengths, index, per_row)

    @property
    def counts(self) -> Tensor | int:
        """(S,) tokens of each segment, or 1 for all."""
        return 1 if self.lengths is None else self.lengths

    @property
    def sizes(self) -> Tensor:
        """(S,) as ``counts``, at least 1, to divide by; a scalar 1 for all."""
        return self.positions.new_ones(()) if self.lengths is None else self.lengths.clamp(min=1)

    def pick(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, T) -> (N,): the values of the loss tokens, a copy."""
        return values.detach().flatten().index_select(0, self.positions).to(dtype)

    def place(self, values: Tensor) -> Tensor:
        """(N,) -> (B, T): back in place, 0 off the loss tokens."""
        flat = values.new_zeros(self.shape.numel())
        return flat.scatter_(0, self.positions, values).view(self.shape)

    def total(self, values: Tensor) -> Tensor:
        """(N,) -> (S,): sums over each segment's tokens."""
        return values if self.lengths is None else _sums(values, self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        """(S,) -> (N,): each segment's value on each of its tokens; the adjoint of ``total``."""
        return values if self.index is None else values.index_select(0, self.index)

    def rows(self, values: Tensor) -> Tensor:
        """(S,) -> (B,): sums over each trajectory's segments."""
        return values if self.per_row is None else _sums(values, self.per_row)


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive stretches of ``values``; 0 for a stretch of length 0."""
    if not len(lengths):
        return values.new_zeros(0)
    return torch.segment_reduce(
        values, "sum", lengths=lengths, unsafe=True
    )  # unsafe: lengths add up, by construction


def _turns(ids: Tensor, row_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths (S,) of the turns and number of turns (B,) of each row, from the turn ids (N,) of the loss tokens."""
    row_ends = row_lengths.cumsum(0)
    first = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=first[1:])
    first[(row_ends - row_lengths)[row_lengths > 0]] = (
        True  # a row's first turn may bear the id of the last row's last
    )
    starts = first.nonzero().squeeze(1)  # (S,)
    lengths = torch.diff(starts, append=starts.new_tensor([len(ids)]))
    row = torch.searchsorted(row_ends, starts, right=True)
    turn = ids[starts]
    returns = (turn.diff() < 0) & (row.diff() == 0)
    if bool((turn < 0).any() | returns.any()):
        if bool((turn < 0).any()):
            raise ValueError(
                f"turn_ids is {int(turn.min())} on a loss token; each needs the id (>= 0) of its turn"
            )
        at = int(returns.nonzero()[0])
        raise ValueError(
            f"turn_ids of trajectory {int(row[at])} fall from {int(turn[at])} to {int(turn[at + 1])}; "
            "they must not decrease along a trajectory"
        )
    return lengths, torch.bincount(row, minlength=len(row_lengths))
