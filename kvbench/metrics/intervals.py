"""95 % intervals of means over samples, and of paired differences of two means over the same samples.

Scores lie in 0..1. Shares of right answers, whose scores are 0 or 1, have Wilson's interval, and their paired
differences Newcombe's (1998, Statistics in Medicine 17:2635, method 10). Other scores have a bootstrap interval, which
for few samples is at least as wide as Student's t. Student's t is also used where only mean and standard error are
known. If all n samples have the same value, the interval has a width too: up to a share z^2 / (n + z^2) of all answers
may differ from those that were seen. The mean over several sets has an interval from those of the sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, stdev

#: quantile of the normal distribution for 95 %, on both sides
Z = 1.959963984540054
#: draws of the bootstrap
DRAWS = 2000
#: from this many samples on a bootstrap is believed: of two, it contains the mean in half of the cases
ENOUGH = 30

Interval = tuple[float, float]


def wilson(right: float, n: int) -> Interval:
    """Return Wilson's score interval of a share of `right` out of `n`."""
    middle = (right + Z**2 / 2) / (n + Z**2)
    spread = math.sqrt(Z**2 * right * (n - right) / n + Z**4 / 4) / (n + Z**2)
    return max(middle - spread, 0.0) if right else 0.0, min(middle + spread, 1.0) if right < n else 1.0


def newcombe(both: float, first: float, second: float, neither: float) -> Interval:
    """Return Newcombe's interval of a paired difference of two shares, the first minus the second.

    The arguments are numbers of samples: right in both, in the first alone, in the second alone, and in neither.
    """
    n = round(both + first + second + neither)
    one, two = (both + first) / n, (both + second) / n
    (low_one, high_one), (low_two, high_two) = wilson(both + first, n), wilson(both + second, n)
    product = both * neither - first * second
    if product > 0:  # Newcombe's continuity correction of phi
        product = max(product - n / 2, 0.0)
    sizes = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = product / math.sqrt(sizes) if sizes else 0.0

    def together(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return one - two - together(one - low_one, high_two - two), one - two + together(high_one - one, two - low_two)


def of_scores(scores: Sequence[float]) -> Interval | None:
    """Return the interval of a mean of scores in 0..1; None if there are no scores."""
    n = len(scores)
    if not n:
        return None
    if _shares(scores) or min(scores) == max(scores):
        return wilson(math.fsum(scores), n)  # of equal scores: no distribution in 0..1 with this mean varies more
    return _bootstrap(tuple(scores), 0.0, 1.0)


def of_pairs(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of ``first - second``, for scores in 0..1 of the same samples; None if empty."""
    n = len(first)
    if not n:
        return None
    if _shares(first) and _shares(second):
        both, one, two = math.fsum(a * b for a, b in zip(first, second, strict=True)), sum(first), sum(second)
        return newcombe(both, one - both, two - both, n - one - two + both)
    differences = tuple(a - b for a, b in zip(first, second, strict=True))
    if max(differences) - min(differences) < 1e-12:
        return _unseen(differences[0], n, -1.0)
    return _bootstrap(differences, -1.0, 1.0)


def of_score_moments(score: float, stderr: float | None, n: int) -> Interval | None:
    """Return the interval of the mean `score` of `n` scores in 0..1, from its standard error; None if `n` is 0."""
    if not n:
        return None
    if not stderr or is_share(score, stderr, n):
        return wilson(score * n, n)
    return _student(score, stderr, n, 0.0, 1.0)


def is_share(score: float, stderr: float | None, n: int) -> bool:
    """Return True if mean and standard error are those of `n` scores that are 0 or 1."""
    return _is_whole(score * n) and (n < 2 or abs((stderr or 0.0) ** 2 * (n - 1) - score * (1 - score)) < 1e-9)


def of_pair_moments(first: float, second: float, stderr: float | None, n: int) -> Interval | None:
    """Return the interval of a paired difference of two means over the same `n` samples; None if `n` is 0.

    The single scores are not known. `stderr` is the standard error of the mean difference; None for a single sample.
    """
    table = paired_counts(first, second, stderr, n)
    if table is not None:
        return newcombe(*table)
    if not n:
        return None
    return _student(first - second, stderr, n, -1.0, 1.0) if stderr else _unseen(first - second, n, -1.0)


def paired_counts(
    first: float, second: float, stderr: float | None, n: int
) -> tuple[float, float, float, float] | None:
    """Return the counts that :func:`newcombe` takes, from two shares and the standard error of their difference.

    None if scores other than 0 and 1 must be among them, so that there is nothing to count.
    """
    if not n or not all(_is_whole(n * share) for share in (first, second)):
        return None
    gap = n * (first - second)
    # differences are -1, 0 or 1: the sum of their squares, which mean and variance give, counts samples that differ
    apart = gap * gap / n + (stderr or 0.0) ** 2 * n * (n - 1) if n > 1 else abs(gap)
    counts = (n * first - (apart + gap) / 2, (apart + gap) / 2, (apart - gap) / 2, n * (1 - second) - (apart + gap) / 2)
    if not all(_is_whole(count) and count > -1e-6 for count in counts):
        return None
    both, one, two, neither = (float(round(count)) for count in counts)
    return both, one, two, neither


def of_moments(value: float, stderr: float | None, n: int) -> Interval | None:
    """Return Student's interval of a mean of `n` numbers; None if they do not vary, or are fewer than two."""
    return _student(value, stderr, n, -math.inf, math.inf) if stderr and n > 1 else None


def centred(value: float, influences: Sequence[float]) -> Interval | None:
    """Return the interval of a figure from its samples' influences: their mean has the figure's standard error."""
    n = len(influences)
    if n < 2:
        return None
    middle = math.fsum(influences) / n
    spread = math.fsum((x - middle) ** 2 for x in influences) / (n - 1)
    return of_moments(value, math.sqrt(spread / n), n)


def square_and_add(values: Sequence[float], ends: Sequence[Interval]) -> Interval:
    """Return the interval of the mean of independent figures, from each one's own interval.

    Distances to the lower ends are squared and added, and so are those to the upper ends: Newcombe's square-and-add,
    for any figures the MOVER of Zou and Donner (2008, Statistics in Medicine 27:1693). A set of few rows, or one whose
    rows are all alike, keeps its width in it, which a sum of moment errors takes to be 0.
    """
    below = math.hypot(*(value - low for value, (low, _) in zip(values, ends, strict=True)))
    above = math.hypot(*(high - value for value, (_, high) in zip(values, ends, strict=True)))
    middle = fmean(values)
    return middle - below / len(values), middle + above / len(values)


def interval_reach(value: float | None, interval: Interval | None) -> float | None:
    """Return the distance from a value to the farther end of its interval: what tables show behind ``±``."""
    return None if value is None or interval is None else max(value - interval[0], interval[1] - value)


def deciding(difference: float, stderr: float | None, n: int, low: float, high: float, widest: float) -> int | None:
    """Return about how many samples would show whether a difference lies between `low` and `high`.

    The estimate assumes that difference and spread stay as they are over the `n` samples so far.

    Args:
        stderr: paired standard error of the difference over `n` samples; None: unknown.
        widest: largest possible difference of a single sample, used if no sample differs so far (`stderr` is 0): the
            number of samples is then such that differences not yet seen could not move the mean beyond a bound.

    Returns:
        The number, more than `n`; None if no number is enough, because the difference equals a bound, or if `stderr` is
        unknown or there is no finite bound.
    """
    gaps = [abs(difference - bound) for bound in (low, high) if math.isfinite(bound)]
    if stderr is None or not gaps or min(gaps) == 0:
        return None
    gap = min(gaps)
    wanted = Z**2 * stderr**2 * n / gap**2 if stderr else Z**2 * (widest / gap - 1)
    return max(math.ceil(wanted), n + 1)


def student(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, accurate to .1 %, by the expansion of Cornish and Fisher."""
    if freedom < 3:
        return (12.706204736432095, 4.302652729911275)[freedom - 1]
    z, terms = Z, 1.0
    powers = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    for power in powers:
        terms /= freedom
        z += power * terms
    return z


def _student(value: float, stderr: float | None, n: int, least: float, most: float) -> Interval:
    spread = student(n - 1) * (stderr or 0.0)
    return max(value - spread, least), min(value + spread, most)


def _unseen(value: float, n: int, least: float) -> Interval:
    """Return the interval of a mean of numbers from `least` to 1 that are all the same."""
    share = Z**2 / (n + Z**2)
    return max(value - share, least), min(value + share, 1.0)


@lru_cache(maxsize=4096)  # a table asks for that of a cell once more for each mean and claim that it is part of
def _bootstrap(values: tuple[float, ...], least: float, most: float) -> Interval:
    from kvbench.metrics.resampling import bootstrap

    low, high = bootstrap([[value] for value in values], draws=DRAWS)
    n = len(values)
    if n < ENOUGH:
        below, above = _student(fmean(values), stdev(values) / math.sqrt(n), n, least, most)
        low, high = min(low, below), max(high, above)
    return max(low, least), min(high, most)


def _shares(scores: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)


def _is_whole(count: float) -> bool:
    return abs(count - round(count)) < 1e-6
