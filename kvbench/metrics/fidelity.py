"""Measures of the difference between a cache's predictions and those of the full-precision cache, by position.

Sources: the statistics of llama.cpp's ``--kl-divergence`` (ggml-org/llama.cpp 050fc7f3, tools/perplexity), and Dutta et
al. 2024 (arXiv 2407.09141) for answers whose correctness changed (flips).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.metrics.resampling import Floats, picked
from kvbench.metrics.resampling import bootstrap as bootstrap
from kvbench.metrics.resampling import drawn as drawn

#: percentiles of the KL divergence that are reported, in addition to its mean and its extremes
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
#: number of the base's most probable tokens whose probability is followed by itself
TOP = 20
#: llama.cpp keeps log-probabilities down to this many nats below the most probable token
FLOOR = 16.0


@dataclass(frozen=True)
class Positions:
    """Comparison of two predictions at each of n positions.

    Args:
        kld: KL divergence of the candidate's distribution from the base's, KL(base || candidate), in nats, ``[n]``.
        change: probability of the true token by the candidate minus that by the base, ``[n]``.
        same_top: True where both give the same token the highest probability (the first one at ties), ``[n]``.
        nll_base, nll: negative log-likelihood of the true token by base and candidate, in nats, ``[n]``.
        top_mass: share of the probability that the base gives to its :data:`TOP` most probable tokens that the
            candidate gives to the same tokens too (:func:`top_mass`), ``[n]``; None in rows that older code made.
    """

    kld: Floats
    change: Floats
    same_top: NDArray[np.bool_]
    nll_base: Floats
    nll: Floats
    top_mass: Floats | None = None


def log_softmax(logits: ArrayLike) -> Floats:
    """Return log-probabilities in float64 for logits ``[n, V]``."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def compare(base: ArrayLike, candidate: ArrayLike, target: Sequence[int] | NDArray[np.integer]) -> Positions:
    """Compare the predictions of two caches, exactly, in float64.

    Args:
        base: raw logits with the full-precision cache, ``[n, V]``.
        candidate: raw logits with the other cache at the same positions, ``[n, V]``.
        target: the token that follows at each position, ``[n]``.
    """
    p, q = log_softmax(base), log_softmax(candidate)
    rows, true = np.arange(len(p)), np.asarray(target)
    weight = np.exp(p)
    return Positions(
        kld=_kl_divergence(weight, p, q),
        change=np.exp(q[rows, true]) - weight[rows, true],
        same_top=np.asarray(base).argmax(-1) == np.asarray(candidate).argmax(-1),
        nll_base=-p[rows, true],
        nll=-q[rows, true],
        top_mass=top_mass(p, q),
    )


def top_mass(p: Floats, q: Floats) -> Floats:
    """Return at each position sum(min(p, q)) / sum(p) over the base's :data:`TOP` most probable tokens, ``[n]``.

    `p` and `q` are log-probabilities of base and candidate, ``[n, V]``. The share is 1 only if the candidate gives each
    of these tokens at least the base's probability.
    """
    top = np.argpartition(-p, min(TOP, p.shape[-1]) - 1, axis=-1)[:, :TOP]
    base, candidate = (np.exp(np.take_along_axis(logs, top, -1)) for logs in (p, q))
    return np.asarray(np.minimum(base, candidate).sum(-1) / base.sum(-1))


def _kl_divergence(weight: Floats, p: Floats, q: Floats) -> Floats:
    """Return the KL divergence of each row; tokens of probability 0 (a logit of -inf) add nothing."""
    with np.errstate(invalid="ignore"):
        terms = weight * (p - q)
    return np.asarray(np.where(weight > 0, terms, 0.0).sum(-1))


def compare_as_llamacpp(
    base: ArrayLike, candidate: ArrayLike, target: Sequence[int] | NDArray[np.integer]
) -> Positions:
    """Compare the predictions of two caches as llama.cpp's ``--kl-divergence`` does, rounding included.

    The arguments are those of :func:`compare`. The program stores the base's log-probabilities in 16 bits; those more
    than :data:`FLOOR` nats below the largest logit are raised to this floor. Tokens at or below -16 nats do not count.
    KL divergences can therefore be slightly negative.
    """
    x = np.asarray(base, dtype=np.float32)
    most = x.max(-1, keepdims=True)
    least = np.maximum(x.min(-1, keepdims=True), most - np.float32(FLOOR))
    total = np.log(np.exp((x - most).astype(np.float64)).sum(-1, keepdims=True)).astype(np.float32)
    scale = (most - least) / np.float32(65535)
    codes = np.where(x > least, np.floor((x - least) / np.where(scale > 0, scale, 1) + np.float32(0.5)), 0)
    # code 0 stands for the log-probability of `least`, which is least - logsumexp(x)
    p = (scale * codes.astype(np.float32) + (least - most - total)).astype(np.float64)
    q = log_softmax(np.asarray(candidate, dtype=np.float32))
    rows, true = np.arange(len(p)), np.asarray(target)
    return Positions(
        kld=np.where(p > -FLOOR, np.exp(p) * (p - q), 0.0).sum(-1),
        change=np.exp(q[rows, true]) - np.exp(p[rows, true]),
        same_top=p.argmax(-1) == q.argmax(-1),
        nll_base=-p[rows, true],
        nll=-q[rows, true],
        top_mass=top_mass(p, q),
    )


def statistics(positions: Positions) -> dict[str, float]:
    """Return the figures of a comparison: means, percentiles, extremes, and errors of the means.

    Percentiles are interpolated linearly between neighbouring positions. Errors (``_stderr``) treat positions as
    independent; :func:`bootstrap` does not. Divergences and likelihoods are in nats.
    """
    kld, change = positions.kld, positions.change
    same = float(positions.same_top.mean())
    named = {"kld_median" if level == 50 else f"kld_p{level:g}": np.percentile(kld, level) for level in PERCENTILES}
    return {
        "kld_mean": float(kld.mean()),
        "kld_stderr": stderr(kld),
        **{name: float(level) for name, level in named.items()},
        "kld_max": float(kld.max()),
        "kld_min": float(kld.min()),
        "change_mean": float(change.mean()),
        "change_stderr": stderr(change),
        "change_rms": float(np.sqrt(np.square(change).mean())),
        "same_top": same,
        "same_top_stderr": math.sqrt(same * (1 - same) / (len(kld) - 1)) if len(kld) > 1 else math.nan,
        "nll_base": float(positions.nll_base.mean()),
        "nll": float(positions.nll.mean()),
        "n": float(len(kld)),
    }


def stderr(values: Floats) -> float:
    """Return the standard error of a mean, as if all values were independent; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return math.sqrt(max(float(np.square(values).mean() - values.mean() ** 2), 0.0) / (len(values) - 1))


def slope(
    index: Sequence[ArrayLike], groups: Sequence[ArrayLike], *, draws: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the least-squares slope of values over an index, and both ends of its 95 % interval.

    The interval is from a bootstrap over prompts. All three numbers are NaN if all values have the same index.

    Args:
        index: the index of each value, for example the number of tokens decoded before it, one array per prompt.
        groups: the values, one array per prompt.
    """
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(index, groups, strict=True)]
    sums = np.array([(len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum()) for x, y in pairs])

    def fitted(total: Floats) -> Floats:
        n, x, y, xx, xy = np.moveaxis(total, -1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((n * xy - x * y) / (n * xx - x * x))

    low, high = np.percentile(fitted(sums[picked(len(pairs), draws, seed)].sum(1)), (2.5, 97.5))
    return float(fitted(sums.sum(0))), float(low), float(high)


def flips(base: Sequence[bool | int], candidate: Sequence[bool | int]) -> dict[str, float]:
    """Count the answers whose correctness changed, and test whether the change of accuracy is more than chance.

    `base` and `candidate` say for each sample whether it was answered correctly with the full-precision cache and with
    the other cache.

    Returns:
        ``lost`` (right to wrong) and ``won`` (wrong to right); ``flips``, their share of the samples; ``change`` of the
        accuracy and its paired standard error ``change_stderr``; ``p``, by McNemar's exact two-sided test; ``n``.
    """
    before, after = np.asarray(base, dtype=bool), np.asarray(candidate, dtype=bool)
    if before.shape != after.shape:
        raise ValueError(f"{len(before)} samples of the base are compared with {len(after)} of the candidate")
    n = len(before)
    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    spread = lost + won - (lost - won) ** 2 / n if n else math.nan
    return {
        "lost": lost,
        "won": won,
        "flips": (lost + won) / n if n else math.nan,
        "change": (won - lost) / n if n else math.nan,
        "change_stderr": math.sqrt(spread / (n - 1) / n) if n > 1 else math.nan,
        "p": mcnemar(lost, won),
        "n": n,
    }


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided p-value of McNemar's exact test that `lost` and `won` changes are equally likely."""
    total = lost + won
    if not total:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(min(lost, won) + 1)) / 2**total
    return min(1.0, 2 * tail)


def position_bins(last: int, width: int | None = None) -> list[tuple[int, int]]:
    """Return bins of the indices 0 to `last`, each by its first index and the one after its last.

    They hold 0, 1, 2 to 3, 4 to 7, ...; with a `width`, that many indices each: 0 to width - 1, and so on.
    """
    if width is not None:
        return [(first, first + width) for first in range(0, last + 1, width)]
    bounds = [0, 1]
    while bounds[-1] <= last:
        bounds.append(2 * bounds[-1])
    return list(itertools.pairwise(bounds))


def by_position(positions: Positions, index: Sequence[int] | NDArray[np.integer]) -> list[Mapping[str, float]]:
    """Average the figures of positions in bins 0, 1, 2 to 3, 4 to 7, ... of an index, to see whether errors grow.

    An index ``[n]`` is, for example, the number of tokens decoded before a position. There is one mapping per bin that
    has positions, with its ``first`` and ``last`` index.
    """
    places = np.asarray(index)
    bins: list[Mapping[str, float]] = []
    for first, end in position_bins(int(places.max(initial=0))):
        inside = (places >= first) & (places < end)
        if inside.any():
            bins.append(
                {
                    "first": first,
                    "last": end - 1,
                    "n": int(inside.sum()),
                    "kld_mean": float(positions.kld[inside].mean()),
                    "kld_max": float(positions.kld[inside].max()),
                    "same_top": float(positions.same_top[inside].mean()),
                    "change_mean": float(positions.change[inside].mean()),
                }
            )
    return bins


@dataclass(frozen=True)
class Divergence:
    """The first difference between two greedy answers to one prompt.

    `compared` is the number of tokens that were compared.

    Args:
        first: index of the first different token; None if there is none up to the shorter answer's end.
    """

    first: int | None
    compared: int


def first_difference(base: Sequence[int], candidate: Sequence[int]) -> Divergence:
    """Return the first index at which two token sequences differ, among the indices that both have."""
    compared = min(len(base), len(candidate))
    first = next((i for i in range(compared) if base[i] != candidate[i]), None)
    if first is None and len(base) != len(candidate):
        first = compared  # one of them ended here, the other went on
    return Divergence(first, compared)
