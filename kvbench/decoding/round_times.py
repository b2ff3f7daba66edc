"""Counts and times of rounds of speculation: of each round, and summed over an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: parts of a round that are timed apart; ``sampling`` is the rest: acceptance, choice of tokens, and Python
PARTS = ("draft", "verify", "flush")


@dataclass
class Round:
    """Counts and time of one round of speculation, for all rows of a batch.

    Args:
        seconds: duration of the round: drafting, verification and rollback.
        settled: number of cached tokens of each row at the beginning of the round. At this point the method has just
            packed or dropped tokens.
        drafted: maximum number of drafts that each row was allowed to accept; 0 if the row had ended or only one token
            was left until its limit.
        accepted: number of drafts that each row accepted.
        emitted: number of tokens that each row gained, the end-of-sequence token included.
        draft_seconds: duration of all drafts of the round; None: not measured apart.
        verify_seconds: duration of the verification; None: not measured apart.
        flush_seconds: duration of packing or dropping tokens before the round; None: not measured apart.
    """

    seconds: float
    settled: list[int]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    flush_seconds: float | None = None


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
    limits = Counter(min(turn.drafted[row], _counted_drafts(turn, row)) for turn, row in mine)
    return {
        "rounds": len(mine),
        "seconds": seconds,
        **{f"{part}_s": known.get(part) if complete else None for part in PARTS},
        "sampling_s": max(seconds - sum(known.values()), 0.0) if complete else None,
        "accepted": sum(accepted),
        "refused": sum(turn.accepted[row] < min(turn.drafted[row], _counted_drafts(turn, row)) for turn, row in mine),
        "tokens": sum(turn.emitted[row] for turn, row in mine),
        "limits": {str(limit): count for limit, count in sorted(limits.items())},
    }


def _counted_drafts(turn: Round, row: int) -> int:
    """Return how many drafts of a round count in a row: all, or those up to an accepted end-of-sequence token."""
    emitted, accepted = turn.emitted[row], turn.accepted[row]
    return emitted if emitted <= accepted else turn.drafted[row]


def row_totals(rounds: Sequence[Round], row: int) -> dict[str, Any]:
    """Return the totals of one row of the batch over all rounds.

    Returns:
        A dict of numbers: ``rounds`` (those in which the row gained tokens), ``drafted`` (drafts that the row could
        accept), ``accepted`` (drafts that it accepted) and ``tokens`` (tokens that it gained). If an accepted draft
        ends the row, later drafts of that round do not count. The acceptance rate is ``accepted / drafted``; the paper
        divides by gamma x rounds instead.
    """
    mine = [r for r in rounds if r.emitted[row]]
    cut = [r.emitted[row] <= r.accepted[row] for r in mine]
    return {
        "rounds": len(mine),
        "drafted": sum(r.emitted[row] if c else r.drafted[row] for r, c in zip(mine, cut, strict=True)),
        "accepted": sum(r.emitted[row] if c else r.accepted[row] for r, c in zip(mine, cut, strict=True)),
        "tokens": sum(r.emitted[row] for r in mine),
    }


def token_seconds(rounds: Sequence[Round], row: int) -> list[float]:
    """Return the decoding time of each token of a row in seconds, estimated from the times of rounds.

    A round yields several tokens at once, so its time is divided among them. Tokens of the row's first round get the
    mean time per token of that round. All later tokens get the mean time per token of all later rounds. Therefore only
    the sum and the mean of the list are meaningful.
    """
    mine = [r for r in rounds if r.emitted[row]]
    if not mine:
        return []
    first, rest = mine[0], mine[1:]
    later = sum(r.emitted[row] for r in rest)
    return [first.seconds / first.emitted[row]] * first.emitted[row] + (
        [sum(r.seconds for r in rest) / later] * later if later else []
    )
