"""Counts and times of rounds of speculation, summed over an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvbench.decoding.speculative import Round

#: parts of a round that are timed apart; ``sampling`` is the rest: acceptance, choice of tokens, and Python
PARTS = ("draft", "verify", "flush")


def totals(rounds: Sequence[Round], rows: Sequence[int]) -> dict[str, Any] | None:
    """Return the sums over all rounds but the first, which may include work that is done once after the prompt.

    If there is only one round, its numbers are returned. A round counts once for each of `rows` that gained tokens in
    it, and so does its time.

    Returns:
        A dict: ``rounds``; ``seconds`` of them; ``draft_s``, ``verify_s``, ``flush_s`` and ``sampling_s`` (the rest),
        which are None if they were not measured apart; ``accepted``, ``refused`` (rounds that refused a draft) and
        ``tokens``; and ``limits``: the number of rounds by the number of drafts that could be accepted. None if no row
        gained tokens.
    """
    mine = [(turn, row) for turn in rounds[1:] or rounds for row in rows if turn.emitted[row]]
    if not mine:
        return None
    times = {part: [getattr(turn, f"{part}_seconds") for turn, _ in mine] for part in PARTS}
    seconds = sum(turn.seconds for turn, _ in mine)
    known = {part: sum(values) for part, values in times.items() if None not in values}
    complete = len(known) == len(PARTS)
    # an end-of-sequence token among the accepted drafts ends the round there
    accepted = [min(turn.accepted[row], turn.emitted[row]) for turn, row in mine]
    limits = Counter(min(turn.drafted[row], _cut(turn, row)) for turn, row in mine)
    return {
        "rounds": len(mine),
        "seconds": seconds,
        **{f"{part}_s": known.get(part) if complete else None for part in PARTS},
        "sampling_s": max(seconds - sum(known.values()), 0.0) if complete else None,
        "accepted": sum(accepted),
        "refused": sum(turn.accepted[row] < min(turn.drafted[row], _cut(turn, row)) for turn, row in mine),
        "tokens": sum(turn.emitted[row] for turn, row in mine),
        "limits": {str(limit): count for limit, count in sorted(limits.items())},
    }


def _cut(turn: Round, row: int) -> int:
    """Return how many drafts of a round count in a row: all, or those up to an accepted end-of-sequence token."""
    emitted, accepted = turn.emitted[row], turn.accepted[row]
    return emitted if emitted <= accepted else turn.drafted[row]
