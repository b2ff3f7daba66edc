"""The figures that a column may show, each as a value and every sample's influence on it.

The value of a figure over n samples has the standard error ``stdev(influences) / sqrt(n)``, and the difference of two
settings over the same samples that of the differences of their influences. For a mean the influence is the sample's own
number; for a ratio or a perplexity it is the first-order (linearised) one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.results import fidelity_fold
from kvbench.results.points import halves

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Statistic:
    """A figure over some samples.

    Args:
        value: the figure.
        influences: each sample's influence on it, in the order of the samples; empty for a figure without an error.
    """

    value: float
    influences: tuple[float, ...] = ()

    @property
    def stderr(self) -> float | None:
        """The standard error; None with fewer than two samples."""
        return standard_error(self.influences)


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of `values`; None with fewer than two."""
    n = len(values)
    if n < 2:
        return None
    middle = fmean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (n - 1) / n)


def paired(first: Statistic, second: Statistic) -> tuple[float, float | None]:
    """Return first less second over the same samples, and the standard error of the difference."""
    differences = [a - b for a, b in zip(first.influences, second.influences, strict=True)]
    return first.value - second.value, standard_error(differences)


def mean_figure(number: Callable[[Row], float | None]) -> Callable[[Sequence[Row]], Statistic | None]:
    """Return a figure that is the mean of `number` over the samples; samples without it make it unknown."""

    def figure(rows: Sequence[Row]) -> Statistic | None:
        values = [number(row) for row in rows]
        known = [float(value) for value in values if value is not None]
        return Statistic(fmean(known), tuple(known)) if known and len(known) == len(values) else None

    return figure


def perplexity(rows: Sequence[Row]) -> Statistic | None:
    """Return the exponential of the mean over spans of each span's mean NLL per token (as GPTQ)."""
    if not rows or not all(row.get("nll") and row["nll"]["n"] for row in rows):
        return None
    means = [row["nll"]["sum"] / row["nll"]["n"] for row in rows]
    value = math.exp(fmean(means))
    return Statistic(value, tuple(value * mean for mean in means))


def acceptance(rows: Sequence[Row]) -> Statistic | None:
    """Return the share of drafted tokens that are accepted, over all samples together (samples are clusters)."""
    drafts = [row.get("speculation") or {} for row in rows]
    total = sum(draft.get("drafted", 0) for draft in drafts)
    if not total:
        return None
    rate = sum(draft.get("accepted", 0) for draft in drafts) / total
    shift = len(rows) / total
    parts = ((draft.get("accepted", 0), draft.get("drafted", 0)) for draft in drafts)
    return Statistic(rate, tuple(rate + shift * (accepted - rate * drafted) for accepted, drafted in parts))


def mean_divergence(rows: Sequence[Row]) -> Statistic | None:
    """Return the mean KL divergence from fp16 per token, over all samples together (samples are clusters)."""
    return per_token([(row.get("fidelity") or {}).get("kld") or () for row in rows])


def flips(rows: Sequence[Row]) -> Statistic | None:
    """Return the share of tokens at which another one than fp16's is the most probable (samples are clusters)."""
    marked = [row for row in rows if row.get("fidelity")]
    return per_token([[1.0 - same for same in fidelity_fold.same_top(row)] for row in marked])


def per_token(numbers: Sequence[Sequence[float]]) -> Statistic | None:
    """Return the mean of the tokens' numbers, of which each sample has some; None without any."""
    total = sum(map(len, numbers))
    if not total:
        return None
    mean, shift = sum(map(sum, numbers)) / total, len(numbers) / total
    return Statistic(mean, tuple(mean + shift * (sum(own) - mean * len(own)) for own in numbers))


def _compression(row: Row) -> float | None:
    bill = row.get("kv_bytes")
    return bill["fp16_equivalent"] * halves(row) / bill["used"]["total"] if bill else None


def _seconds_per_token(row: Row) -> float | None:
    """Return the mean time of an answer's tokens after the first."""
    steps = row["measured"].get("step_s") or []
    return fmean(steps) if steps else None


def quotient(first: Statistic, second: Statistic) -> Statistic:
    """Return first / second over the same samples, with linearised influences."""
    ratio = first.value / second.value
    pairs = zip(first.influences, second.influences, strict=True)
    return Statistic(ratio, tuple(ratio + (a - ratio * b) / second.value for a, b in pairs))


def point_figure(*path: str) -> Callable[[Sequence[Row]], Statistic | None]:
    """Return a figure of a measured point: the number at `path` of its record."""

    def figure(rows: Sequence[Row]) -> Statistic | None:
        value: Any = rows[0]["measured"].get("point") if rows else None
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else Statistic(float(value))

    return figure


def peak(rows: Sequence[Row]) -> Statistic | None:
    """Return the larger of a point's peaks while reading the prompt and while decoding."""
    peaks = ((rows[0]["measured"].get("point") or {}).get("peak") or {}) if rows else {}
    known = [peaks[name] for name in ("prefill", "decode") if peaks.get(name)]
    return Statistic(float(max(known))) if len(known) == 2 else None


def decode_rate(rows: Sequence[Row]) -> Statistic | None:
    """Return the tokens per second of decoding over all samples together, prefill excluded (samples are clusters)."""
    timings = [row["measured"] for row in rows]
    parts = [(m.get("decoded"), m.get("decode_s") or sum(m.get("step_s") or ())) for m in timings]
    if not parts or not all(tokens and seconds for tokens, seconds in parts):
        return None
    total = sum(seconds for _, seconds in parts)
    rate = sum(tokens for tokens, _ in parts) / total
    return Statistic(rate, tuple(rate + len(parts) * (tokens - rate * seconds) / total for tokens, seconds in parts))


#: figures of answers that depend on the model's size and on what else the machine does
SPEEDS = ("seconds_per_token", "decode_rate")

FIGURES: dict[str, Callable[[Sequence[Row]], Statistic | None]] = {
    "score": mean_figure(lambda row: row["scores"].get("score")),
    "kv_mib": mean_figure(lambda row: row["kv_bytes"]["used"]["total"] / 2**20 if row.get("kv_bytes") else None),
    "compression": mean_figure(_compression),
    "seconds_per_token": mean_figure(_seconds_per_token),
    "perplexity": perplexity,
    "acceptance": acceptance,
    "kl": mean_divergence,
    "flips": flips,
    # of points of time and memory: seconds, bytes, tokens per second
    "tpot_s": point_figure("tpot_s", "median"),
    "ttft_s": point_figure("ttft_s"),
    "tokens_per_s": point_figure("tokens_per_s"),
    "peak_decode": point_figure("peak", "decode"),
    "peak_prefill": point_figure("peak", "prefill"),
    "kv_used": point_figure("kv_used", "total"),
    # of points at a forced acceptance: speed-up over plain decoding in the same run, tokens per second, bytes
    "forced_speedup": point_figure("forced", "speedup"),
    "forced_rate": point_figure("forced", "tokens_per_s"),
    "forced_peak": point_figure("forced", "peak"),
    "peak": peak,
    # of answers generated one by one (runtime.batch_size=1)
    "decode_rate": decode_rate,
}
