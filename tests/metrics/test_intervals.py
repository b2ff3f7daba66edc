"""Intervals against published examples, and what they must do where scores do not vary."""

from __future__ import annotations

import math

import pytest

from kvbench.metrics import intervals


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_intervals_of_newcombes_table(right, n, low, high):
    """Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3."""
    assert intervals.wilson(right, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = tuple(1 - end for end in reversed(intervals.wilson(n - right, n)))
    assert intervals.wilson(right, n) == pytest.approx(mirrored)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((20, 12, 2, 16), 0.0562, 0.3292),
        ((53, 1, 0, 0), -0.0496, 0.0977),
        ((54, 0, 0, 0), -0.0664, 0.0664),
        ((30, 0, 0, 24), -0.0358, 0.0358),
        ((1, 1, 7, 12), -0.5069, -0.0256),  # Fagerland, Lydersen and Laake 2014: Bentur et al. 2009
    ],
)
def test_newcombe_gives_the_published_intervals(table, low, high):
    """Newcombe 1998, Statistics in Medicine 17:2635, method 10, and examples of its users."""
    assert intervals.newcombe(*table) == pytest.approx((low, high), abs=1e-4)
    both, first, second, neither = table
    swapped = tuple(-end for end in reversed(intervals.newcombe(both, second, first, neither)))
    assert intervals.newcombe(*table) == pytest.approx(swapped)


def test_pairs_are_counted_from_the_samples():
    first, second = [1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1]
    assert intervals.of_pairs(first, second) == intervals.newcombe(2, 2, 1, 1)
    assert intervals.of_scores(first) == intervals.wilson(4, 6)
    assert intervals.of_pairs([], []) is None is intervals.of_scores([])


@pytest.mark.parametrize("n", [1, 2, 8, 29])
@pytest.mark.parametrize("score", [0.0, 1 / 3, 1.0])
def test_no_interval_of_scores_that_do_not_vary_has_the_width_zero(n, score):
    low, high = intervals.of_scores([score] * n)
    assert 0 <= low <= score <= high <= 1 and high - low > 0.1
    low, high = intervals.of_pairs([score] * n, [score] * n)
    assert low < 0 < high and -low == pytest.approx(high)
    assert intervals.of_pair_moments(score, score, 0.0, n)[0] < 0


def test_scores_between_right_and_wrong_have_a_bootstrap():
    scores = [1.0] * 20 + [1 / 3] * 10
    low, high = intervals.of_scores(scores)
    assert (low, high) == intervals.of_scores(scores)  # its draws are seeded
    spread = 1.96 * (2 / 3) * math.sqrt(2 / 9 / 30)
    assert (low, high) == pytest.approx((7 / 9 - spread, 7 / 9 + spread), abs=0.02)
    low, high = intervals.of_pairs(scores, [1.0] * 30)
    assert (low, high) == pytest.approx((-2 / 9 - spread, -2 / 9 + spread), abs=0.02) and high < 0


@pytest.mark.parametrize("table", [(5, 3, 0, 2), (0, 0, 0, 4), (7, 0, 0, 0), (2, 1, 1, 6), (0, 3, 3, 0)])
def test_moments_of_shares_give_the_pairs_back(table):
    both, first, second, neither = table
    n = sum(table)
    differences = [1] * first + [-1] * second + [0] * (both + neither)
    mean = sum(differences) / n
    error = math.sqrt(sum((value - mean) ** 2 for value in differences) / (n - 1) / n)
    shares = (both + first) / n, (both + second) / n
    assert intervals.paired_counts(*shares, error, n) == table
    assert intervals.of_pair_moments(*shares, error, n) == intervals.newcombe(*table)
    assert intervals.paired_counts(shares[0], shares[1] + 0.3 / n, error, n) is None  # parts of right answers


def test_moments_of_other_figures_give_students_interval():
    quantiles = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 19: 2.093, 39: 2.023, 299: 1.968}
    for freedom, quantile in quantiles.items():
        assert intervals.student(freedom) == pytest.approx(quantile, rel=1.5e-3)
    assert intervals.of_moments(2.0, 0.5, 10) == pytest.approx((2 - 1.131, 2 + 1.131), abs=1e-3)
    assert intervals.of_moments(2.0, None, 1) is None is intervals.of_moments(2.0, 0.0, 9)
    assert intervals.centred(5.0, [1.0, 3.0]) == pytest.approx((5 - 12.706, 5 + 12.706), abs=1e-2)
    assert intervals.of_score_moments(0.9, 0.2, 4)[1] == 1.0  # no score is above 1


def test_what_stands_behind_a_number_reaches_the_farther_end():
    assert intervals.interval_reach(1.0, (0.75, 1.0)) == 0.25 == intervals.interval_reach(0.0, (-0.125, 0.25))
    assert intervals.interval_reach(None, (0.0, 1.0)) is None is intervals.interval_reach(1.0, None)


def test_the_samples_that_would_decide():
    """With them, the interval of the same difference and variance ends at the nearer bound."""
    wanted = intervals.deciding(1.5, 1.0, 20, 0.0, math.inf, 100.0)
    assert 1.96 * math.sqrt(20 / wanted) == pytest.approx(1.5, rel=0.02)
    assert intervals.deciding(0.5, 1.0, 20, -1.0, 1.0, 100.0) == intervals.deciding(-0.5, 1.0, 20, -1.0, 1.0, 100.0)
    unseen = intervals.deciding(0.0, 0.0, 20, -0.01, 0.01, 1.0)
    assert (
        intervals.of_pairs([1.0] * unseen, [1.0] * unseen)[0] > -0.01 > intervals.of_pairs([1.0] * 380, [1.0] * 380)[0]
    )
    assert intervals.deciding(0.0, 1.0, 20, 0.0, math.inf, 1.0) is None  # at the bound no number decides
    assert intervals.deciding(1.0, None, 1, 0.0, math.inf, 1.0) is None
    assert intervals.deciding(5.0, 1.0, 20, 0.0, math.inf, 100.0) == 21  # more than there are


def test_a_bootstrap_of_few_scores_is_no_narrower_than_students_interval():
    """Of two scores, t of 95 % is 12.7: mean 0.35, standard error 0.05."""
    assert intervals.of_scores([0.3, 0.4]) == (0.0, pytest.approx(0.35 + 12.7062 * 0.05))
    assert intervals.of_pairs([0.9, 0.8, 0.7], [0.8, 0.6, 0.4])[0] < 0, "three gains of 0.1 to 0.3 may be none"
    many = [0.3, 0.4] * 15
    assert intervals.of_scores(many)[1] - 0.35 < 2.045 * 0.05 / 29**0.5


def test_the_mean_of_several_figures_adds_squared_distances_to_their_ends():
    low, high = intervals.square_and_add([0.2, 0.6], [(0.17, 0.28), (0.56, 0.75)])
    assert (low, high) == pytest.approx((0.4 - math.hypot(0.03, 0.04) / 2, 0.4 + math.hypot(0.08, 0.15) / 2))
    # Newcombe's interval of two unpaired shares, 56 of 70 less 48 of 80 (1998, 17:873, Table II, method 10)
    ends = [intervals.wilson(56, 70), tuple(-end for end in reversed(intervals.wilson(48, 80)))]
    both = intervals.square_and_add([56 / 70, -48 / 80], ends)
    assert tuple(2 * end for end in both) == pytest.approx((0.0524, 0.3339), abs=1e-4)
