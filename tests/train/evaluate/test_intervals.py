"""Intervals against published values and all resamples, counted; paired tests against hand arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from sorl_train.evaluate.intervals import bootstrap, mcnemar_exact, mean_interval, paired


def test_resampled_means_follow_the_exact_distribution() -> None:
    """Of (0, 0, 1) the 27 resamples have means 0, 1/3, 2/3, 1 in the shares 8, 12, 6, 1."""
    means = bootstrap([0.0, 0.0, 1.0], draws=200_000)
    for value, share in ((0.0, 8 / 27), (1 / 3, 12 / 27), (2 / 3, 6 / 27), (1.0, 1 / 27)):
        assert np.isclose(means, value).mean() == pytest.approx(share, abs=0.004)


def test_an_interval_is_that_of_all_resamples_with_two_made_up_questions() -> None:
    """Of (.25, .5) with 0 and 1 there are 256 resamples."""
    every = [sum(draw) / 4 for draw in itertools.product([0.25, 0.5, 0.0, 1.0], repeat=4)]
    low, high = np.quantile(every, [0.025, 0.975])
    found = mean_interval([0.25, 0.5], draws=50_000)
    assert found.mean == 0.375
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Table I, method 3, as the next three
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (30, 30, 0.8865, 1.0),
        (0, 10, 0.0, 0.2775),
    ],
)
def test_a_share_has_wilsons_interval(right: int, of: int, low: float, high: float) -> None:
    found = mean_interval([1.0] * right + [0.0] * (of - right))
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize("values", [[1.0] * 30, [0.0] * 10, [0.5] * 30, [0.3], [-2.0] * 5, [7.0] * 5])
def test_no_finite_sample_is_certain(values: list[float]) -> None:
    """30 of 30 was 1.00 to 1.00, and 30 values of .5 had no width either."""
    found = mean_interval(values)
    assert found.low < found.high and found.low <= found.mean <= found.high
    for difference in (paired(values, values), paired([0.0] * len(values), values)):
        assert difference.difference.low < difference.difference.high
        assert difference.difference.low <= difference.difference.mean <= difference.difference.high


def test_a_rare_score_is_covered_although_the_sample_may_lack_it() -> None:
    """3% of the questions have a score between 0 and 1; the plain bootstrap covers the mean in 55 of 100 samples."""
    generator, hits = np.random.default_rng(0), 0
    for _ in range(200):
        values = np.where(generator.random(30) < 0.97, 1.0, generator.random(30))
        found = mean_interval(values.tolist(), draws=500)
        hits += found.low <= 0.985 <= found.high
    assert hits / 200 >= 0.93


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
        (10, 2, 2 * (1 + 12 + 66) / 4096),  # .0386
        (1, 8, 2 * (1 + 9) / 512),
    ],
)
def test_mcnemar_by_hand(gained: int, lost: int, p: float) -> None:
    assert mcnemar_exact(gained, lost) == pytest.approx(p)


def test_mcnemar_of_thousands_is_still_exact() -> None:
    assert mcnemar_exact(1050, 950) == pytest.approx(0.0267, abs=0.0003)  # normal: z = 99 / sqrt(2000)
    # a sum of binomials, each made anew, took minutes; z = 82 / sqrt(20151)
    assert mcnemar_exact(10034, 10117) == pytest.approx(0.5635, abs=5e-5)


@pytest.mark.parametrize(
    ("gained", "lost", "of", "low", "high"),
    [
        (5, 0, 5, 0.1958, 1.0),  # 5/7 -+ 1.96 sqrt((1 - 25/49) / 7)
        (0, 0, 30, -0.0866, 0.0866),  # 1.96 sqrt(2) / 32
        (9, 1, 50, 0.0302, 0.2775),  # 8/52 -+ 1.96 sqrt((12/52 - (8/52)^2) / 52)
    ],
)
def test_a_difference_of_shares_by_hand(gained: int, lost: int, of: int, low: float, high: float) -> None:
    a = [0.0] * gained + [1.0] * lost + [1.0] * (of - gained - lost)
    b = [1.0] * gained + [0.0] * lost + [1.0] * (of - gained - lost)
    found, turned = paired(a, b).difference, paired(b, a).difference
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


def test_five_of_five_gained_do_not_tell_six_do() -> None:
    """The verdict was that B is better, with p = 1e-4 and the interval [1, 1]."""
    five, six = paired([0.0] * 5, [1.0] * 5), paired([0.0] * 6, [1.0] * 6)
    assert (five.p, five.better) == (0.0625, None) and five.difference.low > 0
    assert (six.p, six.better) == (0.03125, "B")
    assert paired([1.0] * 6, [0.0] * 6).better == "A"


def test_signs_are_flipped_where_scores_are_no_shares() -> None:
    """Five changes of .5 are as likely by chance as five questions gained: 2 of the 32 choices of signs."""
    five, six = paired([0.0] * 5, [0.5] * 5), paired([0.25] * 9, [0.5] * 6 + [0.25] * 3)
    assert (five.test, six.test) == ("sign flips", "sign flips")
    assert five.p == pytest.approx(2 / 32, abs=0.008) and five.better is None
    assert six.p == pytest.approx(2 / 64, abs=0.006) and six.better == "B"
    # (.5, .25, -.25): signs with a sum of at least .5 in size are those of (1, 1, *), (1, -1, 1), and their opposites
    assert paired([0.0, 0.0, 0.25], [0.5, 0.25, 0.0]).p == pytest.approx(6 / 8, abs=0.015)
    assert paired([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]).p == 1.0
    assert paired([0.0, 0.5], [0.0, 0.5]).better is None


def test_equal_policies_are_seldom_told_apart() -> None:
    """Of 400 comparisons of a policy with itself, in 40 questions of two samples each, at most 5% find a difference."""
    generator, found = np.random.default_rng(0), 0
    for _ in range(400):
        a, b = generator.binomial(2, 0.7, size=(2, 40)) / 2
        found += paired(a.tolist(), b.tolist(), draws=300).better is not None
    assert found / 400 <= 0.05
