"""Times of a round of speculation by part, and the time per token that they and the acceptance predict.

A round with g drafts yields ``(1 - a^(g+1)) / (1 - a)`` tokens on average if each draft is accepted with probability a,
independently of the others (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, eq.
1). Here a is estimated from counts: accepted drafts divided by all decided ones, which are the accepted ones and the
first refused one of each round. The drafts after a refusal decide nothing; the acceptance rate of the paper counts them
as refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: relative difference between expected and measured time per token from which on the reason is stated
APART = 0.05
#: parts of a round, in the order of the tables
PARTS = ("draft", "verify", "sampling", "flush")


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the expected number of tokens of a round with g = `gamma` drafts: ``(1 - a^(g+1)) / (1 - a)``."""
    return sum(acceptance**number for number in range(gamma + 1))


def summed(totals: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Add up the counts and times of answers (:func:`kvbench.decoding.round_times.totals`); None: without rounds.

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
    """Explain the difference between the measured and the expected time per token by its shares, as a sentence.

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
