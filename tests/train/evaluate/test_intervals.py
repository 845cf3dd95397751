"""Intervals against all resamples, counted; paired tests against hand arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sorl_train.evaluate.intervals import mcnemar_exact, mean_interval, paired
from sorl_train.run.bootstrap import bootstrap


def test_resampled_means_follow_the_exact_distribution() -> None:
    """Of (0, 0, 1) the 27 resamples have means 0, 1/3, 2/3, 1 in the shares 8, 12, 6, 1."""
    means = bootstrap([0.0, 0.0, 1.0], draws=200_000)
    for value, share in ((0.0, 8 / 27), (1 / 3, 12 / 27), (2 / 3, 6 / 27), (1.0, 1 / 27)):
        assert np.isclose(means, value).mean() == pytest.approx(share, abs=0.004)


def test_an_interval_is_that_of_all_resamples() -> None:
    values = [0.0, 0.25, 0.5, 1.0, 1.0, 0.0]
    every = [sum(draw) / 6 for draw in itertools.product(values, repeat=6)]  # 46,656
    low, high = np.quantile(every, [0.025, 0.975])
    found = mean_interval(values, draws=50_000)
    assert found.mean == pytest.approx(2.75 / 6)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


def test_two_draws_by_hand() -> None:
    indices = np.random.default_rng(7).integers(0, 4, size=(2, 4))
    values = [1.0, 2.0, 4.0, 8.0]
    by_hand = [sum(values[i] for i in row) / 4 for row in indices]
    assert bootstrap(values, draws=2, seed=7).tolist() == by_hand
    found = mean_interval(values, draws=2, seed=7)
    below, above = sorted(by_hand)  # quantiles of two values lie between them
    assert found.low == pytest.approx(below + 0.025 * (above - below))
    assert found.high == pytest.approx(below + 0.975 * (above - below))


def test_the_interval_of_a_share_is_as_wide_as_it_should_be() -> None:
    found = mean_interval([1.0] * 600 + [0.0] * 400)
    spread = 1.96 * math.sqrt(0.6 * 0.4 / 1000)
    assert found.mean == 0.6
    assert (found.low, found.high) == (
        pytest.approx(0.6 - spread, abs=0.003),
        pytest.approx(0.6 + spread, abs=0.003),
    )


def test_intervals_repeat_and_cover_the_true_mean_about_as_often_as_they_say() -> None:
    assert mean_interval([0.0, 1.0, 1.0]) == mean_interval([0.0, 1.0, 1.0])
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        found = mean_interval((generator.random(100) < 0.3).astype(float).tolist(), draws=500)
        hits += found.low <= 0.3 <= found.high
    assert 0.90 <= hits / 300 <= 0.98


def test_many_questions_are_resampled_in_parts() -> None:
    whole = bootstrap([0.0, 1.0] * 3000, draws=2000)  # 12 million indices
    assert whole.shape == (2000,) and whole.std() == pytest.approx(math.sqrt(0.25 / 6000), rel=0.1)


def test_no_values_have_no_interval() -> None:
    assert math.isnan(mean_interval([]).mean)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (1, 8, 2 * (1 + 9) / 512),
    ],
)
def test_mcnemar_by_hand(gained: int, lost: int, p: float) -> None:
    assert mcnemar_exact(gained, lost) == pytest.approx(p)


def test_mcnemar_of_thousands_is_still_exact() -> None:
    assert mcnemar_exact(1050, 950) == pytest.approx(0.0267, abs=0.0003)  # normal: z = 99 / sqrt(2000)


def test_pairs_count_what_changed() -> None:
    found = paired([0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])
    assert (found.gained, found.lost, found.questions) == (2, 1, 4)
    assert (found.mean_a, found.mean_b, found.difference.mean) == (0.5, 0.75, 0.25)
    assert found.mcnemar_p == 1.0
    assert paired([0.5, 1.0], [1.0, 1.0]).mcnemar_p is None  # means of samples: no coin to flip
