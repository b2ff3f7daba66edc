"""Records of the scores in `metrics.json`: means, differences from fp16, perplexities, fidelity, points.

Points measure time and memory. Fidelity is the distance of the predictions with a cache from those with the fp16 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
    """The positions at which greedy answers first differ from fp16's.

    Args:
        never: share of the answers that equal fp16's to the end.
        median: median of the first differing index, counted from 0; None if more than half of the answers never differ.
        compared: median length of the answers in tokens.
        gap: median, over the answers that differ, of fp16's log-probability of its first choice minus that of its
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

    `own` errors arise in the layer itself, given fp16's input; `total` errors include those of the layers before it.
    `worst` is the index of the layer with the largest error of its own.
    """

    own: list[float]
    total: list[float]
    worst: int = typed_key(minimum=0)
    n: int = typed_key(minimum=1)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of fp16's predictions: stored or made live, and all that 16-bit rounding depends on.

    Rounding depends on the device, the dtypes, the number of rows per batch, and the options ``runtime.compile`` and
    ``runtime.prefill_chunk`` of the run that made them.
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
        positions: number of compared positions. The prompt's last token does not count: the prefill predicts there.
        prompts: number of samples with at least one position.
        first_kld: mean KL divergence at the prompt's last token; None for a simulated pass.
        top_mass: mean share of the probability that fp16 gives to its 20 most probable tokens that this cache gives to
            the same tokens (:func:`kvbench.metrics.fidelity.top_mass`); None for rows that older code made.
        bins: figures by the number of tokens since the exact prefill.
        growth: slope of the KL divergence over that number.
        left: where greedy answers first differ from fp16's; None for texts.
        layers: errors of each layer; None unless some samples were probed.
        answers: ``fp16`` for fp16's own answers, ``task`` for reference answers; None for texts.
    """

    kld: Divergences
    change: Change
    same_top: SameTop
    top_mass: float | None = typed_key(optional=True, minimum=0)
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


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Mean difference, method minus fp16, between a run and its fp16 run over the `n` samples that both have.

    `stderr` is its standard error, `low` and `high` its 95 % interval (:mod:`kvbench.metrics.intervals`).
    """

    diff: float
    stderr: float | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=None, minimum=1)
    low: float | None = typed_key("lower end of the 95 % interval", optional=True)
    high: float | None = typed_key("upper end of the 95 % interval", optional=True)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Mean of the scores of all tasks, each with the same weight, with its difference from fp16.

    The score is None if no task has one; `n` counts samples; `vs_fp16` is None without an fp16 run.
    """

    score: float | None
    stderr: float | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=0, minimum=0)
    vs_fp16: Pair | None = None
    low: float | None = typed_key("lower end of the 95 % interval", optional=True)
    high: float | None = typed_key("upper end of the 95 % interval", optional=True)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Mean over the samples of a second score that the task's scorer computes, for example ``flexible`` of GSM8K."""

    score: float | None
    stderr: float | None = typed_key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Nll:
    """Mean negative log-likelihood (NLL) per token of the reference answers, in nats.

    It is the mean over the samples of each sample's NLL per token. `vs_fp16` is the difference over the same samples;
    None without an fp16 run.
    """

    mean: float | None
    stderr: float | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=0, minimum=0)
    vs_fp16: Pair | None = None


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Perplexity of a text, measured on spans (stretches of consecutive tokens) of it.

    Args:
        bits_per_byte: negative log-likelihood in bits per UTF-8 byte of the text.
        mode: ``decode``, ``simulated`` or ``fp16`` (explained in :mod:`kvbench.tasks.perplexity`).
        prefill: number of tokens at the beginning of each span that form a prompt and are not scored.
        chunk: number of tokens per forward pass.
        windows: number of spans.
        vs_fp16: difference of perplexities over the same spans; None without an fp16 run.
    """

    ppl: float = typed_key(exclusiveMinimum=0)
    stderr: float | None = typed_key(default=None, minimum=0)
    bits_per_byte: float | None = None
    mode: Literal["decode", "simulated", "fp16"] | None = None
    prefill: int | None = typed_key(default=None, minimum=0)
    chunk: int | None = typed_key(default=None, minimum=1)
    windows: int | None = typed_key(default=None, minimum=1)
    vs_fp16: Pair | None = None


@dataclass(frozen=True, kw_only=True)
class PointTpot:
    """Distribution of the time per decode step in seconds, at one prompt length and batch size.

    The first step, which may include work that is done once after the prompt, does not count. ``n`` is the number of
    steps.
    """

    median: float | None = typed_key(default=None, minimum=0)
    mean: float | None = typed_key(default=None, minimum=0)
    p10: float | None = typed_key(default=None, minimum=0)
    p50: float | None = typed_key(optional=True, minimum=0)
    p90: float | None = typed_key(default=None, minimum=0)
    p99: float | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=None, minimum=1)


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Mean times of a round of speculation by part, and the time per token that they and the acceptance predict.

    All times are in seconds, `draft_s` for all drafts of a round.

    Args:
        sampling_s: the rest of the round: acceptance, choice of tokens, and Python.
        flush_s: seconds of packing or dropping tokens before a round.
        acceptance: a: accepted drafts divided by all decided ones (accepted, or the first refused of a round).
        tokens: measured number of tokens per round and sequence.
        expected_tokens: ``(1 - a^(g+1)) / (1 - a)`` with g drafts, averaged over the rounds.
        tpot_s: measured seconds per token, over the same rounds.
        expected_tpot_s: ``(draft_s + verify_s) / expected_tokens``.
        why: explanation of the difference between `tpot_s` and `expected_tpot_s`, if it exceeds 5 %; else None.
    """

    draft_s: float = typed_key(minimum=0)
    verify_s: float = typed_key(minimum=0)
    sampling_s: float = typed_key(minimum=0)
    flush_s: float = typed_key(minimum=0)
    acceptance: float = typed_key(minimum=0, maximum=1)
    tokens: float = typed_key(minimum=0)
    expected_tokens: float = typed_key(minimum=0)
    tpot_s: float = typed_key(minimum=0)
    expected_tpot_s: float = typed_key(minimum=0)
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """Time and memory measured at one prompt length and batch size (``dataset=efficiency``).

    Times are in seconds and sizes in bytes. A point whose ``status`` is ``oom`` ran out of memory and has only some of
    the figures.
    """

    status: Literal["ok", "oom"]
    ttft_s: float | None = typed_key(optional=True, minimum=0)
    search_s: float | None = typed_key(optional=True, minimum=0)
    prefill_s: float | None = typed_key(optional=True, minimum=0)
    first_step_s: float | None = typed_key(optional=True, minimum=0)
    tpot_s: PointTpot | None = typed_key(optional=True)
    itl_s: dict[str, float] | None = typed_key("percentiles of the time between two outputs", optional=True, minimum=0)
    tokens_per_s: float | None = typed_key(optional=True, minimum=0)
    new_tokens: int | None = typed_key(optional=True, minimum=2)
    fill: str | None = typed_key("random: random keys and values instead of a prompt's", optional=True)
    capture_s: float | None = typed_key(optional=True, minimum=0)
    stepping: str | None = typed_key(optional=True)
    speculation: dict[str, int] | None = typed_key("summed over the rows of the batch", optional=True, minimum=0)
    forced: float | None = typed_key(
        "probability with which drafts were accepted by chance, so that the text is meaningless", optional=True
    )
    round_times: RoundTimes | None = typed_key("times of a round by part, and what they predict", optional=True)
    path: str | None = typed_key(optional=True)
    weights: int | None = typed_key(optional=True, minimum=0)
    over_used: float | None = typed_key(optional=True, minimum=0)
    over_reserved: float | None = typed_key(optional=True, minimum=0)
    predicted: dict[str, Any] | None = typed_key("prediction of the roofline", optional=True)
    read_bytes: int | None = typed_key("bytes that a decode step must read", optional=True, minimum=0)
    GB_s: float | None = typed_key("bytes read per second", optional=True, minimum=0)
    ceiling: dict[str, Any] | None = typed_key(
        "maximum read rate of the device in GB/s, and whether it was measured or is a known value", optional=True
    )
    read_share: float | None = typed_key("read rate as a share of the ceiling", optional=True, minimum=0)
    over_roof: float | None = typed_key("TPOT divided by the roofline's", optional=True, minimum=0)
    same: dict[str, int] | None = typed_key(
        "tokens of captured steps that are equal to those of eager steps", optional=True, minimum=0
    )
    stock: dict[str, Any] | None = typed_key("points of stock transformers, by cache", optional=True)
    bytes_asked: int | None = typed_key(optional=True, minimum=0)
    phase: str | None = typed_key(optional=True)
    beyond: int | None = typed_key(optional=True, minimum=1)
    kv_used: int | None = typed_key(optional=True, minimum=0)
    kv_reserved: int | None = typed_key(optional=True, minimum=0)
    peak_prefill: int | None = typed_key(optional=True, minimum=0)
    peak_decode: int | None = typed_key(optional=True, minimum=0)
    kv_ratio: float | None = typed_key(
        "fp16's bytes of keys and values divided by those in use", optional=True, minimum=0
    )
    kv_ratio_reserved: float | None = typed_key(
        "fp16's bytes divided by those of all buffers", optional=True, minimum=0
    )
    r_nom: float | None = typed_key("compression by the formats, without metadata and window", optional=True, minimum=0)
    r_alloc: float | None = typed_key("compression by all memory beyond the weights", optional=True, minimum=0)
    energy: dict[str, Any] | None = typed_key(
        "joules per token by NVML, or the reason why there are none", optional=True
    )
    vs_fp16: dict[str, float | None] | None = typed_key(
        "ratios between this point and the fp16 run's", optional=True, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class Points:
    """Times and memory of one prompt length at several batch sizes.

    Args:
        max_batch: largest batch size that fitted into memory.
        oom_batch: smallest batch size that did not fit.
        best_batch: batch size with the highest throughput, `tokens_per_s`.
        max_batch_vs_fp16: `max_batch` divided by that of fp16. None if one of the runs tried no batch size that did
            not fit, because its largest is then unknown.
        tokens_per_s_vs_fp16: `tokens_per_s` divided by that of fp16.
    """

    max_batch: int | None = typed_key(default=None, minimum=1)
    oom_batch: int | None = typed_key(default=None, minimum=1)
    best_batch: int | None = typed_key(default=None, minimum=1)
    tokens_per_s: float | None = typed_key(default=None, minimum=0)
    max_batch_vs_fp16: float | None = typed_key(default=None, minimum=0)
    tokens_per_s_vs_fp16: float | None = typed_key(default=None, minimum=0)
    batches: dict[str, Point] = typed_key(keys="^[0-9]+$")


@dataclass(frozen=True, kw_only=True)
class KlBound:
    """Lower bound of the KL divergence from the server's own fp16, from the log-probabilities that it returns.

    Args:
        mean: mean over all places up to each answer's first difference from fp16's, in nats.
        stderr: standard error of the mean over prompts.
        top: number of log-probabilities per place.
    """

    mean: float = typed_key(minimum=0)
    stderr: float | None = typed_key(default=None, minimum=0)
    positions: int = typed_key(minimum=1)
    prompts: int = typed_key(minimum=1)
    top: int = typed_key(minimum=1)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Mean score of one task, or of one task at one prompt length, with everything else measured on its samples."""

    score: float | None
    stderr: float | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=0, minimum=0)
    vs_fp16: Pair | None = None
    version: int | None = None
    scorer_version: int | None = None
    variants: dict[str, Variant] = typed_key("additional scores of the scorer", factory=dict)
    nll: Nll | None = None
    perplexity: Perplexity | None = typed_key("perplexity of a text; null for tasks with answers", default=None)
    points: Points | None = typed_key("time and memory (dataset=efficiency)", optional=True)
    fidelity: Fidelity | None = typed_key("comparison of predictions with fp16's (dataset=fidelity)", optional=True)
    low: float | None = typed_key("lower end of the score's 95 % interval", optional=True)
    high: float | None = typed_key("upper end of the score's 95 % interval", optional=True)
    answers: int | None = typed_key("answers, if each of the n problems has several", optional=True)
    left: Departure | None = typed_key(
        "the token at which freely generated answers first differ from those of the fp16 run", optional=True
    )
    kl_bound: KlBound | None = typed_key("lower bound of the KL divergence from fp16 (model=endpoint)", optional=True)
