"""A batch in pieces: the share of each rank, and what the pieces gave put back together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sorl_train.learner.batch import Batch


def rows_by_rank(batch: Batch, ranks: int) -> list[Tensor]:
    """The rows of each rank, longest trajectories first, so that ranks have about as many tokens."""
    order = torch.argsort(batch.lengths, descending=True, stable=True)
    return [order[rank::ranks] for rank in range(ranks)]


def by_rank(batch: Batch, ranks: int) -> list[Batch]:
    """The share of each rank, all of the same number of rows.

    Ranks gather weights and add up gradients together, so they need equally many micro-batches. Where the trajectories
    do not divide over the ranks, the last ones also get the shortest trajectory, without its loss tokens.
    """
    rows = rows_by_rank(batch, ranks)
    return [batch.rows(own) if len(own) == len(rows[0]) else _with_filler(batch, own) for own in rows]


def _with_filler(batch: Batch, rows: Tensor) -> Batch:
    share = batch.rows(torch.cat([rows, batch.lengths.argmin()[None]]))
    loss_mask = share.loss_mask.clone()
    loss_mask[-1] = False
    return share.with_fields(loss_mask=loss_mask)


def put_together(batch: Batch, rows: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Put rows that were computed in pieces back into the batch's order: float32 (B, T), 0 in the padding."""
    whole = torch.zeros(batch.action_mask.shape)
    for index, part in zip(rows, parts, strict=True):
        whole[index, : part.shape[1]] = part[: len(index)].float()
    return whole
