"""Arithmetic of ``bench speculation``: medians of rounds, times between measured gammas, and the grid of speeds.

A round with g drafts takes ``g * draft + verify(g) + sampling(g)``, and each token adds its share of the flushes. It
yields ``(1 - a^(g+1)) / (1 - a)`` tokens on average if every draft is accepted with probability a.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.decoding.round_times import Round
from kvbench.profiling.timing import median
from kvbench.results.speculation import expected_tokens

#: rounds at the beginning of a measurement that do not count
SKIPPED = 2
Figures = dict[str, Any]


def full(rounds: Iterable[Round], gamma: int) -> list[Round]:
    """Return the rounds in which every row could accept all drafts, without the first :data:`SKIPPED`."""
    return [turn for turn in rounds if all(limit == gamma for limit in turn.drafted)][SKIPPED:]


def block_times(rounds: Sequence[Round], tokens: int) -> list[float]:
    """Return the milliseconds per token and row of consecutive blocks of at least `tokens` tokens per row.

    An unfinished block at the end is left out.
    """
    times: list[float] = []
    seconds = gained = 0.0
    for turn in rounds:
        seconds, gained = seconds + turn.seconds, gained + fmean(turn.emitted)
        if gained >= tokens:
            times.append(1e3 * seconds / gained)
            seconds = gained = 0.0
    return times


def part_times(rounds: Sequence[Round], gamma: int) -> Figures:
    """Return the times of the parts of rounds in milliseconds.

    Returns:
        ``gamma``; ``rounds``, their number; ``round_ms``, the median of the whole; ``tokens``, their mean number per
        round and row. If the parts were timed: the medians ``draft_ms`` (of one draft), ``verify_ms`` and
        ``sampling_ms`` (the rest of a round), and ``flush_ms``, the mean per token.
    """
    figures: Figures = {
        "gamma": gamma,
        "rounds": len(rounds),
        "round_ms": 1e3 * median([turn.seconds for turn in rounds]),
        "tokens": fmean(fmean(turn.emitted) for turn in rounds),
    }
    timed = [
        (turn.seconds, turn.draft_seconds, turn.verify_seconds, turn.flush_seconds)
        for turn in rounds
        if turn.draft_seconds is not None and turn.verify_seconds is not None and turn.flush_seconds is not None
    ]
    if timed:
        rest = [whole - (draft or 0) - (verify or 0) - (flush or 0) for whole, draft, verify, flush in timed]
        figures |= {
            "draft_ms": 1e3 * median([draft or 0.0 for _, draft, _, _ in timed]) / gamma,
            "verify_ms": 1e3 * median([verify or 0.0 for _, _, verify, _ in timed]),
            "sampling_ms": 1e3 * max(median(rest), 0.0),
            "flush_ms": 1e3 * sum(flush or 0.0 for _, _, _, flush in timed) / (len(timed) * figures["tokens"]),
        }
    return figures


def between(scan: Sequence[Mapping[str, Any]], gamma: int, name: str) -> float:
    """Return a time at `gamma`: measured, interpolated, or that of the nearest measured gamma.

    `scan` has the figures of each measured gamma (:func:`part_times`), in ascending order.
    """
    below = [entry for entry in scan if entry["gamma"] <= gamma]
    above = [entry for entry in scan if entry["gamma"] >= gamma]
    if not below or not above:
        return float((below[-1] if below else above[0])[name])
    low, high = below[-1], above[0]
    if low["gamma"] == high["gamma"]:
        return float(low[name])
    share = (gamma - low["gamma"]) / (high["gamma"] - low["gamma"])
    return float(low[name] + share * (high[name] - low[name]))


def flush_time(scan: Sequence[Mapping[str, Any]]) -> float:
    """Return the milliseconds of flushes per token, over the rounds of all gammas: it does not depend on gamma."""
    tokens = [entry.get("rounds", 1) * entry.get("tokens", 1.0) for entry in scan]
    return float(sum(entry["flush_ms"] * n for entry, n in zip(scan, tokens, strict=True)) / sum(tokens))


def expected_cell(scan: Sequence[Mapping[str, Any]], acceptance: float, gamma: int) -> Figures | None:
    """Return the expected milliseconds per token at an acceptance and a gamma; None if no parts were timed.

    Returns:
        ``acceptance``, ``gamma``, ``tokens`` (expected per round), ``ms``, and ``times``: ``measured``, or
        ``interpolated`` if no rounds with this gamma were timed.
    """
    timed = [entry for entry in scan if "draft_ms" in entry]
    if not timed:
        return None
    tokens = expected_tokens(acceptance, gamma)
    draft = between(timed, gamma, "draft_ms")
    round_ms = gamma * draft + between(timed, gamma, "verify_ms") + between(timed, gamma, "sampling_ms")
    return {
        "acceptance": acceptance,
        "gamma": gamma,
        "tokens": tokens,
        "ms": round_ms / tokens + flush_time(timed),
        "times": "measured" if any(entry["gamma"] == gamma for entry in timed) else "interpolated",
    }


def expected_grid(
    scan: Sequence[Mapping[str, Any]], acceptances: Sequence[float], gammas: Sequence[int]
) -> list[Figures]:
    """Return the expected milliseconds per token for each acceptance and gamma (:func:`expected_cell`)."""
    cells = [expected_cell(scan, acceptance, gamma) for acceptance in acceptances for gamma in gammas]
    return [one for one in cells if one is not None]


def cheapest_gamma(cells: Iterable[Mapping[str, Any]], acceptance: float) -> int | None:
    """Return the gamma with the shortest expected time per token at an acceptance; None if the grid lacks it."""
    mine = [one for one in cells if one["acceptance"] == acceptance]
    return min(mine, key=lambda one: (one["ms"], one["gamma"]))["gamma"] if mine else None
