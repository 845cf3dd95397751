"""Which trajectories an optimizer step is taken on."""

from __future__ import annotations

import pytest

from sorl_train.config.seeds import generator
from sorl_train.learner.batch import collate
from sorl_train.learner.update_settings import mini_batches, steps_of_batch

from ..conftest import short_config
from .test_batch import trajectory

WHOLE = collate([trajectory(f"t{n}", [1, 2, 3], [-1, 0, 0], [1.0]) for n in range(32)])


@pytest.mark.parametrize("size", [4, 8, 32])
@pytest.mark.parametrize("epochs", [1, 2])
def test_what_exclusions_leave_is_spread_evenly(size: int, epochs: int) -> None:
    """For every number of trajectories that may be left: all once an epoch, in as few mini-batches as hold them, whose
    sizes differ by one at most; none is a remainder that would take a whole step of Adam for itself."""
    config = short_config(rollout__batch_size=32, update__mini_batch_size=size, update__epochs=epochs)
    for left in range(1, 33):
        batch = WHOLE.rows(list(range(left)))
        minis = list(mini_batches(batch, config, step=3))
        per_epoch = len(minis) // epochs
        assert per_epoch == -(-left // size) and len(minis) == per_epoch * epochs <= steps_of_batch(config)
        for epoch in range(epochs):
            part = minis[epoch * per_epoch : (epoch + 1) * per_epoch]
            sizes = [len(mini) for mini in part]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
            assert sorted(name for mini in part for name in mini.ids) == sorted(batch.ids)


def test_a_batch_without_exclusions_is_cut_as_it_always_was() -> None:
    """Consecutive pieces of the seed's order: the bytes of earlier runs depend on it."""
    config = short_config(rollout__batch_size=32, update__mini_batch_size=8, update__epochs=2)
    found = [mini.ids for mini in mini_batches(WHOLE, config, step=5)]
    for epoch in range(2):
        order = generator(config.seed, "mini_batches", 5, epoch).permutation(32)
        for number in range(4):
            expected = tuple(f"t{i}" for i in order[8 * number : 8 * number + 8])
            assert found[4 * epoch + number] == expected
