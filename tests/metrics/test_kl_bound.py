"""The lower bound of KL from the most probable tokens, against the divergence of whole distributions."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.metrics.kl_bound import kl_lower_bound, until_divergence


def tops(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    values = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-values)[:count]
    return [(int(token), float(values[token])) for token in order]


@pytest.mark.parametrize("count", [1, 3, 20, 200])
def test_it_is_below_the_divergence_and_equals_it_with_all_tokens(count: int) -> None:
    rng = np.random.default_rng(count)
    for noise in (0.0, 0.1, 2.0):
        first = rng.normal(size=200) * 3
        second = first + noise * rng.normal(size=200)
        p, q = (one - np.log(np.exp(one).sum()) for one in (first, second))
        whole = float((np.exp(p) * (p - q)).sum())
        bound = kl_lower_bound(tops(first, count), tops(second, count))
        assert 0.0 <= bound <= whole + 1e-9
        if count == 200:
            assert bound == pytest.approx(whole, abs=1e-9)
        if count == 20 and noise == 2.0:
            assert bound > 0.3 * whole


def test_lists_without_a_common_token_and_rounded_ones() -> None:
    assert kl_lower_bound([(1, -0.1)], [(2, -0.1)]) == 0.0
    assert kl_lower_bound([(1, 1e-6)], [(1, -1.0)]) == pytest.approx(1.0, abs=1e-5)


def test_places_end_with_the_first_difference() -> None:
    one, other = [(1, -0.1)], [(1, -0.5)]
    same = until_divergence([1, 2, 3], [1, 2, 3], [one] * 3, [other] * 3)
    assert len(same) == 3
    assert len(until_divergence([1, 2, 3], [1, 9, 3], [one] * 3, [other] * 3)) == 2
    assert len(until_divergence([1, 2], [1, 2, 3], [one] * 2, [other] * 3)) == 2
    assert until_divergence([1], [9], [one], [other]) == [same[0]]
