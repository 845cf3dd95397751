"""The shares of the ranks: equally many rows, all trajectories once, and loss tokens in the trust region's sample."""

from __future__ import annotations

import pytest
import torch

from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.trust_region import final_kl_sample
from sorl_train.openrlhf.rank_shards import by_rank, put_together, rows_by_rank

from ..learner.test_overlong import of_length


def batch_of(rows: int) -> Batch:
    """Trajectories of different lengths, in no order."""
    return collate([of_length(6 + (7 * row) % 31) for row in range(rows)])


@pytest.mark.parametrize("rows", [1, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_have_equally_many_rows_and_each_trajectory_counts_once(rows: int, ranks: int) -> None:
    batch = batch_of(rows)
    shares = by_rank(batch, ranks)
    assert {len(share) for share in shares} == {-(-rows // ranks)}
    counted = [
        name for share in shares for name in (share.ids[i] for i in share.loss_mask.any(dim=1).nonzero())
    ]
    assert sorted(counted) == sorted(batch.ids)
    assert sum(int(share.loss_mask.sum()) for share in shares) == int(batch.loss_mask.sum())
    found = [share.token_ids[:, 1:].float() for share in shares]
    whole = put_together(batch, rows_by_rank(batch, ranks), found)
    assert torch.equal(whole, batch.token_ids[:, 1:].float())


def test_the_trust_region_sees_loss_tokens_whatever_was_filtered() -> None:
    """32 trajectories over 8 ranks: the longest of each rank are filtered, as overlong.exclude does.

    Every fourth row of each rank's share, longest first, would be a filtered one.
    """
    batch = batch_of(32)
    loss_mask = batch.loss_mask.clone()
    loss_mask[torch.argsort(batch.lengths, descending=True)[:8]] = False
    batch = batch.with_fields(loss_mask=loss_mask)
    assert not any(share.loss_mask[::4].any() for share in by_rank(batch, 8))
    sample = by_rank(batch.rows(final_kl_sample(batch.loss_mask)), 8)
    assert sum(int(share.loss_mask.any(dim=1).sum()) for share in sample) == 6  # of 24
    assert {len(share) for share in sample} == {1}
