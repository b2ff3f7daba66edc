"""A lower bound of the KL divergence of two distributions of which only the most probable tokens are known.

Tokens that both lists name are kept apart, all others are merged into one event. Merging events never increases the
divergence (the data-processing inequality), so what is left is a lower bound; it is close where the lists hold most of
the probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: the most probable tokens of a distribution: pairs of token id and log-probability
Top = Sequence[tuple[int, float]]


def kl_lower_bound(first: Top, second: Top) -> float:
    """Return a lower bound of KL(first || second) in nats, at least 0.

    Log-probabilities are those of the whole vocabulary. Rounding may bring their sum slightly above 1; the rest then
    counts as empty.
    """
    p, q = dict(first), dict(second)
    both = p.keys() & q.keys()
    rest_p, rest_q = (max(0.0, 1.0 - math.fsum(math.exp(one[token]) for token in both)) for one in (p, q))
    total = math.fsum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
    if rest_p > 0.0 and rest_q > 0.0:
        total += rest_p * math.log(rest_p / rest_q)
    return max(0.0, total)


def until_divergence(
    tokens: Sequence[int], others: Sequence[int], tops: Sequence[Top], other_tops: Sequence[Top]
) -> list[float]:
    """Return the bounds KL(first || other) at the places of two greedy answers up to the first differing token.

    That place counts too, because the tokens before it are the same; after it the two texts differ.
    """
    places = min(len(tops), len(other_tops))
    same = next(
        (i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), min(len(tokens), len(others))
    )
    return [kl_lower_bound(tops[place], other_tops[place]) for place in range(min(places, same + 1))]
