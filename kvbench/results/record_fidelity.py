"""Records of fidelity in `metrics.json`: how far the predictions with a cache are from those with the fp16 cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.results.typed import typed_key


@dataclass(frozen=True, kw_only=True)
class Divergences:
    """KL divergences KL(fp16 || candidate) in nats, over all decoded positions.

    Intervals contain 95 % of the values that a bootstrap over prompts gives.

    Args:
        mean, low, high: mean over positions, and its interval.
        of_prompts: mean over prompts of each prompt's mean.
        p99_9_low, p99_9_high: interval of `p99_9`.
        rms: root of the mean square.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    of_prompts: float
    median: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    p99_9_low: float | None = None
    p99_9_high: float | None = None
    max: float
    min: float
    rms: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """Probability of the true token with the candidate's cache minus that with fp16's.

    `low` and `high` are the interval of the mean over positions, and `rms` the root of the mean square.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    rms: float


@dataclass(frozen=True, kw_only=True)
class SameTop:
    """Share of the positions at which both caches find the same token most probable, with its interval."""

    share: float = typed_key(minimum=0, maximum=1)
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Figures of the positions whose index, the number of tokens since the exact prefill, is in a range."""

    first: int = typed_key(minimum=0)
    last: int = typed_key(minimum=0)
    n: int = typed_key(minimum=1)
    kld_mean: float
    kld_max: float
    same_top: float
    change_mean: float


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Slope of the KL divergence over the number of decoded tokens, in nats per 1000 tokens, with its interval."""

    per_1000: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The positions at which greedy decoding leaves fp16's answers.

    Args:
        never: share of the answers that stay fp16's to the end.
        median: median of the first differing index, counted from 0; None if more than half of the answers never leave.
        compared: median length of the answers in tokens.
        gap: median, over the answers that leave, of fp16's log-probability of its first choice minus that of its
            second, at that index, in nats; a small gap is a near-tie, which rounding can decide.
    """

    n: int = typed_key(minimum=1)
    never: float = typed_key(minimum=0, maximum=1)
    median: float | None = None
    compared: float
    gap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Relative errors of each layer's attention output, averaged over the samples that were probed.

    `own` errors arise in a layer, with fp16's input to it; `total` errors are as decoded, with those of the layers
    before. `worst` is the index of the layer with the largest error of its own.
    """

    own: list[float]
    total: list[float]
    worst: int = typed_key(minimum=0)
    n: int = typed_key(minimum=1)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of fp16's predictions: stored or made live, device, dtype, and what else sums in 16 bits depend on.

    That is the number of rows of their batches, and the options ``runtime.compile`` and ``runtime.prefill_chunk`` of
    the run that made them.
    """

    kind: Literal["stored", "live"]
    device: str | None = None
    dtype: str | None = None
    arithmetic: str | None = typed_key(optional=True)
    batch_rows: int | None = typed_key(default=None, minimum=1)
    compile: bool | None = typed_key(optional=True)
    prefill_chunk: int | None = typed_key(optional=True, minimum=1)


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Comparison of the predictions with a cache and with the fp16 cache, over the samples of a task.

    Args:
        nll_base, nll: mean negative log-likelihood of the true token with the fp16 cache and with this one, in nats.
        positions: number of positions; that of the prompt's last token, which the prefill predicts, is apart.
        prompts: number of samples with at least one position.
        first_kld: mean KL divergence where the prefill predicts; None for a simulated pass.
        bins: figures by the number of tokens since the exact prefill.
        growth: slope of the KL divergence over that number.
        left: where greedy decoding leaves fp16's answers; None for texts.
        layers: errors of each layer; None unless some samples were probed.
        answers: ``fp16`` for fp16's own answers, ``task`` for reference answers; None for texts.
    """

    kld: Divergences
    change: Change
    same_top: SameTop
    nll_base: float
    nll: float
    positions: int = typed_key(minimum=1)
    prompts: int = typed_key(minimum=1)
    first_kld: float | None = None
    bins: list[Bin] = typed_key(factory=list)
    growth: Growth | None = None
    left: Departure | None = None
    layers: Layers | None = None
    mode: Literal["decode", "simulated"] = "decode"
    statistics: Literal["exact", "llamacpp"] = "exact"
    answers: Literal["fp16", "task"] | None = None
    reference: Source | None = None
