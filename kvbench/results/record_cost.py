"""Records of cost in `metrics.json`: bytes, memory peaks, times and speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvbench.results.record_scores import RoundTimes
from kvbench.results.typed import typed_key


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Size of one sequence's cache in bytes, averaged over samples: the total and its parts.

    Args:
        scales: scales, minima and zero points of the codes.
        window: tokens in full precision.
        index: bookkeeping, such as the positions of tokens.
        state: states of fixed size of a hybrid model's layers without attention.
    """

    total: int | None = typed_key(default=None, minimum=0)
    codes: int | None = typed_key(default=None, minimum=0)
    scales: int | None = typed_key(default=None, minimum=0)
    window: int | None = typed_key(default=None, minimum=0)
    index: int | None = typed_key(default=None, minimum=0)
    state: int | None = typed_key(default=None, minimum=0)


@dataclass(frozen=True, kw_only=True)
class KvBytes:
    """Size of one sequence's KV cache in bytes, averaged over samples.

    Args:
        used: bytes of the tokens that the cache holds.
        reserved: bytes of the buffers allocated for them, which may have room for more tokens.
        fp16_equivalent: bytes of the same tokens and states at 16 bits per element.
        ratio: bytes that method=fp16 needs for the same tokens in the model's dtype, divided by the total of `used`: 4
            means a quarter of the memory.
    """

    used: Parts
    reserved: Parts
    fp16_equivalent: int | None = typed_key(default=None, minimum=0)
    ratio: float | None = typed_key(
        "bytes that method=fp16 needs for the same tokens, divided by those used", default=None, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Largest memory peaks in bytes that any of the `n` samples with a measured peak reached.

    `kind` says how the peaks of prefill and decoding were measured: ``cuda_allocator``, or ``cpu_live_tensors``, the
    sizes of live tensors on a CPU. `rss` is the peak of the process's resident memory.
    """

    prefill: int | None = typed_key(default=None, minimum=0)
    decode: int | None = typed_key(default=None, minimum=0)
    kind: Literal["cuda_allocator", "cpu_live_tensors"] | None = None
    rss: int | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Ttft:
    """Median time to first token in seconds, from the start of prefill, without warm-up samples.

    `shared` is the number of samples whose prompt was read once for several methods (``runtime.shared_prefill``); their
    time is that of the shared prefill plus the time in which the method placed the tokens.
    """

    median: float | None = typed_key(default=None, minimum=0)
    n: int = typed_key(default=1, minimum=0)
    shared: int = typed_key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Tpot:
    """Time per output token in seconds, without warm-up samples.

    `median` and `p99` are over `n` decode steps, without the first step of each sample; `first_step` is the median of
    these first steps.
    """

    median: float | None = typed_key(default=None, minimum=0)
    p99: float | None = typed_key(default=None, minimum=0)
    first_step: float | None = typed_key(default=None, minimum=0)
    n: int | None = typed_key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Timings of the `n` samples that a run generated on one device; `tokens_per_s` counts decoding time alone."""

    ttft_s: Ttft
    tpot_s: Tpot
    tokens_per_s: float | None = typed_key(minimum=0)
    n: int | None = typed_key(default=0, minimum=0)


@dataclass(frozen=True, kw_only=True)
class InterToken:
    """A line fitted to the time per token of decoding: ``slope_s * length + intercept_s`` seconds.

    ``length`` is the number of tokens in the cache; ``lengths`` is the number of different prompt lengths in the fit.
    """

    slope_s: float = typed_key("seconds per token of length")
    intercept_s: float = typed_key("seconds at length 0")
    lengths: int = typed_key("number of lengths that the line is fitted to", minimum=2)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Acceptance and speed of a run with speculative decoding.

    `acceptance_rate` is accepted divided by drafted tokens, and `stderr` its standard error.

    Args:
        gamma: number of tokens drafted per round; ``auto``: chosen for each round.
        draft: the cache that the draft reads, for example ``upper`` (QuantSpec's ``draft`` option).
        draft_weights: the weights that the draft uses, for example ``same`` (the target's).
        tokens_per_round: mean number of tokens that a round of drafting and verification produces.
        tokens: number of tokens that all rounds produced.
        speedup: time per token of the fp16 run divided by this run's.
        expected_speedup: time per token of the fp16 run divided by the time per token that `round_times` predicts.
    """

    gamma: Any = None
    draft: str | None = None
    draft_weights: str | None = None
    acceptance_rate: float | None
    stderr: float | None = None
    tokens_per_round: float | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    tokens: int | None = None
    n: int | None = None
    speedup: float | None = None
    expected_speedup: float | None = None
    round_times: RoundTimes | None = None
