"""Acceptance and speed of a speculative run, and the times of its rounds by part, from its rows.

A round with g drafts yields ``(1 - a^(g+1)) / (1 - a)`` tokens on average if each draft is accepted with probability a,
independently of the others (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, eq.
1). Here a is estimated from counts: accepted drafts divided by all decided ones, which are the accepted ones and the
first refused one of each round. The drafts after a refusal decide nothing; the acceptance rate of the paper counts them
as refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.results.samples import MEASURED, Row

#: hyper-parameters of a method that control speculation
SETTINGS = ("gamma", "draft", "draft_weights")


def speculation(rows: Sequence[Row], method: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the acceptance rate and related figures of a run with speculative decoding; None if nothing was drafted.

    They are the content of :class:`kvbench.results.record_cost.Speculation`. ``acceptance_rate`` is the number of
    accepted tokens divided by the number of drafted ones, both summed over all samples (in the paper,
    ``accepted / (gamma * rounds)``), and ``stderr`` its standard error, clustered by sample. ``round_times`` leaves out
    warm-up samples, as all times do. The caller sets ``speedup`` and ``expected_speedup`` (:func:`add_speedups`).
    `method` holds the options of the method.
    """
    drafts = [row["speculation"] for row in rows if row.get("speculation") and row["speculation"]["rounds"]]
    if not drafts:
        return None
    totals = {key: sum(draft[key] for draft in drafts) for key in ("rounds", "drafted", "accepted", "tokens")}
    rate = totals["accepted"] / totals["drafted"] if totals["drafted"] else None
    timings = [row.get(MEASURED) or {} for row in rows]
    rounds = summed(timing.get("rounds") for timing in timings if not timing.get("warm_up"))
    return {
        **{key: method.get(key) for key in SETTINGS},
        "acceptance_rate": rate,
        "stderr": ratio_error([draft["accepted"] for draft in drafts], [draft["drafted"] for draft in drafts]),
        "tokens_per_round": totals["tokens"] / totals["rounds"],
        **totals,
        "n": len(drafts),
        "speedup": None,
        "expected_speedup": None,
        "round_times": round_times(rounds),
    }


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    """Return the standard error of the ratio ``sum(parts) / sum(wholes)``, to first order (linearised).

    Each pair of a part and a whole, such as accepted and drafted tokens, belongs to one sample and forms a cluster,
    because the drafted tokens of one text are not independent. The error is None with fewer than two pairs, or if the
    denominator is 0.
    """
    n, total = len(parts), sum(wholes)
    if n < 2 or not total:
        return None
    rate = sum(parts) / total
    rest = [part - rate * whole for part, whole in zip(parts, wholes, strict=True)]
    return math.sqrt(n / (n - 1) * sum(value * value for value in rest)) / total


def add_speedups(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> None:
    """Set ``speedup`` and ``expected_speedup`` of a run's speculation, in place, from the `metrics.json` of both runs.

    The expected speed-up is the measured one times the ratio between the measured and the expected time per token.
    `baseline`, the fp16 run, is None if there is none.
    """
    figures = metrics["speculation"]
    figures["speedup"] = measured = speedup(metrics, baseline)
    times = figures.get("round_times")
    figures["expected_speedup"] = measured * times["tpot_s"] / times["expected_tpot_s"] if measured and times else None


def speedup(metrics: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> float | None:
    """Return the speed-up of a run over its fp16 run: fp16's median TPOT divided by the run's median TPOT.

    Only times from the same device are compared. If both runs were timed on several devices, the result is the mean of
    one ratio per device. It is None without an fp16 run of the same batch size, or if no device has timed both runs.
    """
    if not baseline or metrics["config"].get("batch_size") != baseline["config"].get("batch_size"):
        return None
    ratios = [
        full["tpot_s"]["median"] / own["tpot_s"]["median"]
        for device, own in metrics["timings"].items()
        if (full := baseline["timings"].get(device)) and own["tpot_s"]["median"] and full["tpot_s"]["median"]
    ]
    return fmean(ratios) if ratios else None


#: relative difference between expected and measured time per token from which on the reason is stated
APART = 0.05
#: parts of a round, in the order of the tables
PARTS = ("draft", "verify", "sampling", "flush")


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the expected number of tokens of a round with g = `gamma` drafts: ``(1 - a^(g+1)) / (1 - a)``."""
    return sum(acceptance**number for number in range(gamma + 1))


def summed(totals: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Add up the counts and times of answers (:func:`kvbench.decoding.round_times.totals`); None: no rounds.

    A sum of times is None if any answer's is. The result is None if no answer has rounds.
    """
    entries = [entry for entry in totals if entry]
    if not entries:
        return None
    names = [name for name in entries[0] if name != "limits"]
    limits: dict[str, int] = {}
    for entry in entries:
        for limit, count in entry["limits"].items():
            limits[limit] = limits.get(limit, 0) + count
    values = {name: [entry[name] for entry in entries] for name in names}
    return {**{name: None if None in times else sum(times) for name, times in values.items()}, "limits": limits}


def round_times(totals: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the mean times of a round, and expected and measured time per token, from :func:`summed`.

    They are the content of :class:`kvbench.results.record_scores.RoundTimes`; None without rounds, or if the parts of
    the rounds were not timed.
    """
    if not totals or totals["draft_s"] is None or not totals["accepted"] + totals["refused"]:
        return None
    rounds = totals["rounds"]
    parts = {f"{part}_s": totals[f"{part}_s"] / rounds for part in PARTS}
    acceptance = totals["accepted"] / (totals["accepted"] + totals["refused"])
    expected = sum(expected_tokens(acceptance, int(g)) * n for g, n in totals["limits"].items()) / rounds
    tokens = totals["tokens"] / rounds
    tpot, expected_tpot = totals["seconds"] / totals["tokens"], (parts["draft_s"] + parts["verify_s"]) / expected
    apart = tpot / expected_tpot - 1.0 if expected_tpot else None
    return {
        **parts,
        "acceptance": acceptance,
        "tokens": tokens,
        "expected_tokens": expected,
        "tpot_s": tpot,
        "expected_tpot_s": expected_tpot,
        "why": None if apart is None or abs(apart) <= APART else why(parts, tokens, expected, apart),
    }


def why(parts: Mapping[str, float], tokens: float, expected: float, apart: float) -> str:
    """Return a sentence that explains the difference between measured and expected time per token by its causes.

    Args:
        parts: seconds of a round by part: ``draft_s``, ``verify_s``, ``sampling_s`` and ``flush_s``.
        tokens: measured number of tokens of a round; `expected` is the expected one.
        apart: measured time per token divided by the expected one, minus 1.
    """
    work = parts["draft_s"] + parts["verify_s"]
    return (
        f"{apart:+.0%} per token: sampling and Python take {parts['sampling_s'] / work:.0%} of draft and verification, "
        f"flushes {parts['flush_s'] / work:.0%}; {tokens:.2f} tokens a round, {expected:.2f} expected"
    )
