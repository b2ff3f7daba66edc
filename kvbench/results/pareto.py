"""The Pareto front: the points that no other one beats in both cost and quality."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]], higher: bool = True) -> list[int]:
    """Return the indices of the points on the Pareto front, cheapest first.

    A point is a cost, of which less is better, and a quality: with `higher`, more is better, as for scores; else less,
    as for perplexities.
    """
    sign = -1 if higher else 1
    indices: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1])):
        if not indices or sign * points[i][1] < sign * points[indices[-1]][1]:
            indices.append(i)
    return indices
