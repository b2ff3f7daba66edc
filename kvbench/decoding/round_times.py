"""Counts and times of rounds of speculation, by which gamma, the number of drafts per round, is chosen.

A round with g drafts takes ``g * draft + verify(g)`` seconds and is expected to yield ``1 + a1 + a1 a2 + ... + a1..ag``
tokens, where ai is the probability that draft i is accepted if all drafts before it were. The g with the most expected
tokens per second is chosen. With one acceptance for all positions this is the geometric model of Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding" (2023), sec. 3.3 and 3.5.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
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
        A dict: ``rounds``; their ``seconds``; ``draft_s``, ``verify_s``, ``flush_s`` and ``sampling_s`` (the rest),
            which are None if they were not measured apart; ``accepted``, ``refused`` (rounds that refused a draft) and
            ``tokens``; and ``limits``: the number of rounds by the number of drafts that could be accepted. None if no
            row gained tokens.
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
    """Return how many drafts of a round count for a row: all, or up to an accepted end-of-sequence token."""
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


#: weight of a round's counts after each later round: the counts of the last 50 rounds or so decide
_DISCOUNT = 0.98
#: acceptance assumed before the first round, and the number of drafts that this assumption weighs as much as
_PRIOR, _PRIOR_WEIGHT = 0.8, 10.0
#: number of drafts that the acceptance of all positions weighs as much as in the estimate for one position
_SHARED_WEIGHT = 8.0
#: number of rounds whose times count; their median is robust against a round that was interrupted
_TIMED = 9
#: predicted gain in tokens per second from which on gamma changes: to a value already timed, and to an untimed one,
#: whose verification might have to be captured first
_MARGIN, _NEW_MARGIN = 0.01, 0.03
#: gamma of the first rounds, while nothing is known (QuantSpec, Table 6: best at 4 or 6)
_FIRST = 4


class Gamma:
    """Chooser of gamma for each round of one generation.

    The choice depends on the recorded numbers only, not on chance. No round is spent on exploration alone: a value that
    has not been tried is chosen only if it is predicted to be 3 % faster than the present one. Its verification time is
    estimated from those of the nearest values that were timed. Old rounds count less and less, so a position that is no
    longer drafted returns to the acceptance of all positions.

    Raises:
        ValueError: a choice is below 1, or there is none.
    """

    def __init__(self, choices: Iterable[int] = range(1, 9)) -> None:
        self.choices = tuple(sorted(set(choices)))
        if not self.choices or self.choices[0] < 1:
            raise ValueError(f"choices={self.choices}: expected at least one number, all of them at least 1")
        self.current = min(self.choices, key=lambda gamma: abs(gamma - _FIRST))
        self._accepted = [0.0] * self.choices[-1]
        self._tried = [0.0] * self.choices[-1]
        self._draft: deque[float] = deque(maxlen=_TIMED)
        self._verify: dict[int, deque[float]] = {}

    def next(self) -> int:
        """Return the gamma of the next round; 4, or the choice closest to it, until the times of a round are known."""
        if not self._draft or not self._verify:
            return self.current
        rates = {gamma: self.rate(gamma) for gamma in self.choices}
        gains = {
            gamma: rate / rates[self.current] - 1.0 - (_MARGIN if gamma in self._verify else _NEW_MARGIN)
            for gamma, rate in rates.items()
            if gamma != self.current
        }
        best = max(gains, key=lambda gamma: gains[gamma], default=self.current)
        if gains and gains[best] > 0.0:
            self.current = best
        return self.current

    def record(
        self,
        gamma: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        draft_seconds: float | None,
        verify_seconds: float | None,
    ) -> None:
        """Record the counts and times of one round with `gamma` drafts.

        Args:
            drafted: number of drafts that each row was allowed to accept; 0 for a row that had ended.
            draft_seconds: seconds of all drafts of the round; None: not measured.
            verify_seconds: seconds of the verification; None: not measured.
        """
        self._accepted = [_DISCOUNT * count for count in self._accepted]
        self._tried = [_DISCOUNT * count for count in self._tried]
        for limit, agreed in zip(drafted, accepted, strict=True):
            # the first refused draft was tried too; those behind it tell nothing
            for position in range(min(agreed + 1, limit, len(self._tried))):
                self._tried[position] += 1.0
                self._accepted[position] += position < agreed
        if draft_seconds is not None and gamma > 0:
            self._draft.append(draft_seconds / gamma)
        if verify_seconds is not None:
            self._verify.setdefault(gamma, deque(maxlen=_TIMED)).append(verify_seconds)

    def acceptance(self, position: int) -> float:
        """Return the estimated probability that the draft at `position` (from 0) is accepted if all before it were."""
        shared = (sum(self._accepted) + _PRIOR * _PRIOR_WEIGHT) / (sum(self._tried) + _PRIOR_WEIGHT)
        return (self._accepted[position] + shared * _SHARED_WEIGHT) / (self._tried[position] + _SHARED_WEIGHT)

    def tokens(self, gamma: int) -> float:
        """Return the expected number of tokens that a row gains in a round with `gamma` drafts."""
        total = chance = 1.0
        for position in range(gamma):
            chance *= self.acceptance(position)
            total += chance
        return total

    def rate(self, gamma: int) -> float:
        """Return the expected number of tokens per second and row with `gamma` drafts per round."""
        return self.tokens(gamma) / (gamma * median(self._draft) + self._verification(gamma))

    def _verification(self, gamma: int) -> float:
        """Return the seconds of verifying `gamma` drafts: measured, or interpolated between the nearest timed values.

        Below the smallest and above the largest timed value, the time is that of the nearest one: it hardly depends on
        the number of tokens as long as it is spent on reading weights and cache.
        """
        below = max((timed for timed in self._verify if timed <= gamma), default=None)
        above = min((timed for timed in self._verify if timed >= gamma), default=None)
        if below is None or above is None or below == above:
            nearest = above if below is None else below
            assert nearest is not None
            return median(self._verify[nearest])
        low, high = median(self._verify[below]), median(self._verify[above])
        return low + (high - low) * (gamma - below) / (above - below)
