"""Scores of MRCR: the similarity of an answer to the right message, and the area under the scores by length.

The score follows the README of openai/mrcr at 204b0d4e. The area is that of Context Arena and of vLLM's studies: the
trapezoid rule over the mean score of each bin at its upper edge, linear in tokens, divided by the distance from the
first edge to the last one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from typing import Any

#: upper edges of the bins, in tokens of messages and answer; the first bin begins at 4,096 tokens
BINS = tuple(2**power for power in range(13, 21))
#: lengths at which areas are published; a run's own last bin is shown too
PUBLISHED = (131_072, 1_048_576)

_KEY = re.compile(r"(.*_[248]needle)@(\d+)")


def score_mrcr(prediction: str, gold: str, prefix: str) -> dict[str, float]:
    """Score a repeated message by its similarity (difflib) to the right one, as in MRCR.

    The score is 0 unless the answer begins with `prefix`, which is removed from both texts. Spaces before it count.
    """
    if not prediction.startswith(prefix):
        return {"score": 0.0}
    texts = prediction.removeprefix(prefix), gold.removeprefix(prefix)
    return {"score": difflib.SequenceMatcher(None, *texts).ratio()}


def area_weights(edges: Sequence[int]) -> list[float]:
    """Return the weight of each bin's mean in the area under the curve, for at least two edges in increasing order.

    The weights add up to 1; that of the first and of the last bin is half the distance to the neighbouring edge.
    """
    places = [edges[0], *edges, edges[-1]]
    ends = zip(places, places[2:], strict=False)
    return [(after - before) / 2 / (edges[-1] - edges[0]) for before, after in ends]


@dataclass(frozen=True)
class Area:
    """Area under the scores of one task, from the first bin to the one that ends at `edge`, and its standard error.

    `difference` and its error are those from fp16; None if a bin has no paired difference. Bins are independent, so
    their errors add up by squares.
    """

    edge: int
    area: float
    stderr: float | None
    difference: tuple[float, float | None] | None

    def text(self) -> str:
        """Return the area in words, such as ``up to 131072 tokens: 0.885 ± 0.012``; ± is the standard error."""
        line = f"up to {self.edge} tokens: {self.area:.3f}{_error(self.stderr)}"
        if self.difference is not None:
            line += f", {self.difference[0]:+.3f}{_error(self.difference[1])} compared with fp16"
        return line


def areas(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[Area]]]:
    """Yield the areas of each MRCR task in a run's scores, keyed ``task@edge``, to each published length and the last.

    An area ends at the last bin of those that were run without a gap from the first one on; a task without the first
    and second bin has none.
    """
    tasks: dict[str, dict[int, Mapping[str, Any]]] = {}
    for key, entry in scores.items():
        match = _KEY.fullmatch(key)
        if match and entry.get("score") is not None:
            tasks.setdefault(match[1], {})[int(match[2])] = entry
    for task, by_edge in tasks.items():
        edges = list(takewhile(by_edge.__contains__, BINS))
        ends = [edge for edge in edges[1:] if edge in PUBLISHED or edge == edges[-1]]
        yield task, [_area([edge for edge in edges if edge <= end], by_edge) for end in ends]


def _area(edges: Sequence[int], by_edge: Mapping[int, Mapping[str, Any]]) -> Area:
    weights, entries = area_weights(edges), [by_edge[edge] for edge in edges]
    pairs = [entry.get("vs_fp16") for entry in entries]
    difference = None
    if all(pairs):
        sums = sum(weight * pair["diff"] for weight, pair in zip(weights, pairs, strict=True) if pair)
        difference = sums, _summed(weights, [pair["stderr"] for pair in pairs if pair])
    area = sum(weight * entry["score"] for weight, entry in zip(weights, entries, strict=True))
    return Area(edges[-1], area, _summed(weights, [entry["stderr"] for entry in entries]), difference)


def _summed(weights: Sequence[float], errors: Sequence[float | None]) -> float | None:
    """Return the standard error of a weighted sum; None if that of a part is unknown."""
    parts = [None if error is None else (weight * error) ** 2 for weight, error in zip(weights, errors, strict=True)]
    return None if None in parts else sqrt(sum(part or 0.0 for part in parts))


def _error(stderr: float | None) -> str:
    return "" if stderr is None else f" ± {stderr:.3f}"
