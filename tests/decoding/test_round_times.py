"""Counts and times of rounds, summed over rows and rounds.

The choice of gamma, by simulation against the best gamma that never changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from kvbench.decoding.round_times import Gamma, Round, totals

TIMES = {"draft_seconds": 1.0, "verify_seconds": 0.5, "flush_seconds": 0.25}
ROUNDS = [
    Round(9.0, [10, 10], [4, 4], [4, 4], [5, 5], **TIMES),  # the first one does not count
    Round(2.0, [15, 15], [4, 4], [4, 1], [5, 2], **TIMES),
    Round(3.0, [20, 17], [2, 4], [2, 0], [1, 1], **TIMES),  # row 0 ends with its first accepted draft
    Round(4.0, [21, 18], [0, 1], [0, 1], [0, 2], **TIMES),
]


def test_each_row_counts_the_rounds_in_which_it_gains_tokens() -> None:
    assert totals(ROUNDS, [0]) == {
        "rounds": 2,
        "seconds": 5.0,
        "draft_s": 2.0,
        "verify_s": 1.0,
        "flush_s": 0.5,
        "sampling_s": 1.5,
        "accepted": 5,
        "refused": 0,
        "tokens": 6,
        "limits": {"1": 1, "4": 1},
    }
    both, other = totals(ROUNDS, [0, 1]), totals(ROUNDS, [1])
    assert both is not None and other is not None
    assert (other["accepted"], other["refused"], other["tokens"], other["limits"]) == (2, 2, 5, {"1": 1, "4": 2})
    assert both["rounds"] == 5 and both["seconds"] == 14.0 and both["limits"] == {"1": 2, "4": 3}


def test_parts_that_were_not_timed_are_not_guessed() -> None:
    computed = totals([*ROUNDS[:3], replace(ROUNDS[3], verify_seconds=None)], [1])
    assert computed is not None and computed["seconds"] == 9.0
    assert [computed[f"{part}_s"] for part in ("draft", "verify", "sampling", "flush")] == [None] * 4


def test_a_single_round_counts_and_none_gives_nothing() -> None:
    computed = totals(ROUNDS[:1], [0])
    assert computed is not None and computed["seconds"] == 9.0 and computed["tokens"] == 5
    assert totals([], [0]) is None and totals(ROUNDS[3:], [0]) is None


def test_measured_apart_is_not_more_than_the_whole() -> None:
    """Device times of the parts may add up to slightly more than the host's time of the round."""
    computed = totals([replace(ROUNDS[1], seconds=1.7)], [0])
    assert computed is not None and computed["sampling_s"] == pytest.approx(0.0)


Times = Callable[[int], tuple[float, float]]
Acceptance = Callable[[int, int], float]


def flat(draft: float, verify: float, slope: float = 0.0) -> Times:
    """Return the times of drafting and verifying `gamma` tokens."""
    return lambda gamma: (gamma * draft, verify + slope * gamma)


def simulate(
    times: Times, acceptance: Acceptance, rounds: int, fixed: int | None = None, rows: int = 1
) -> tuple[float, list[int]]:
    """Return tokens per second of simulated rounds and the gamma of each; `acceptance` of a round and a position."""
    chance, chooser, tokens, seconds, chosen = random.Random(7), Gamma(), 0, 0.0, []
    for number in range(rounds):
        gamma = chooser.next() if fixed is None else fixed
        accepted = []
        for _ in range(rows):
            draws = [chance.random() < acceptance(number, position) for position in range(gamma)]
            accepted.append(next((i for i, good in enumerate(draws) if not good), gamma))
        draft, verify = times(gamma)
        if fixed is None:
            chooser.record(gamma, [gamma] * rows, accepted, draft, verify)
        tokens += sum(accepted) + rows
        seconds += draft + verify
        chosen.append(gamma)
    return tokens / seconds, chosen


def best_fixed(times: Times, rate: float) -> tuple[int, float]:
    """Return the best fixed gamma of the geometric model and its tokens per second."""
    speeds = {g: sum(rate**i for i in range(g + 1)) / sum(times(g)) for g in range(1, 9)}
    best = max(speeds, key=lambda gamma: speeds[gamma])
    return best, speeds[best]


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("times", [flat(3.0, 6.4), flat(6.0, 12.5), flat(1.0, 6.0, 0.2), flat(5.0, 6.0)])
def test_close_to_the_best_fixed_gamma(times: Times, rate: float) -> None:
    speed, _ = simulate(times, lambda number, position: rate, 400)
    _, best = best_fixed(times, rate)
    assert speed > 0.95 * best


def test_rows_of_a_batch_are_averaged() -> None:
    speed, _ = simulate(flat(3.0, 6.4), lambda number, position: 0.9, 200, rows=4)
    assert speed / 4 > 0.95 * best_fixed(flat(3.0, 6.4), 0.9)[1]


def test_follows_a_change_of_acceptance() -> None:
    times = flat(1.5, 6.0)
    _, chosen = simulate(times, lambda number, position: 0.95 if number < 200 else 0.3, 400)
    assert sum(chosen[150:200]) / 50 > 5
    assert sum(chosen[350:]) / 50 < 2.5


def test_uses_the_acceptance_of_each_position() -> None:
    """Drafts 1 to 3 are nearly always accepted and the fourth never: 3 is best, whatever the mean says."""
    speed, chosen = simulate(flat(2.0, 6.0), lambda number, position: 0.98 if position < 3 else 0.0, 400)
    assert sum(gamma == 3 for gamma in chosen[50:]) > 0.8 * len(chosen[50:])
    assert speed > 0.93 * (1 + 0.98 + 0.98**2 + 0.98**3) / 12.0


def test_exploration_is_bounded() -> None:
    """Verifications cost the same for all lengths, so only a predicted gain leads to a new gamma."""
    _, chosen = simulate(flat(3.0, 6.4), lambda number, position: 0.9, 400)
    assert len(set(chosen)) <= 5
    assert sum(a != b for a, b in pairwise(chosen)) <= 40


def test_an_expensive_verification_is_left_again() -> None:
    """The verification of more than 4 drafts takes three times as long: tried, measured, and not used again."""
    _, chosen = simulate(lambda g: (g * 0.3, 6.0 if g <= 4 else 18.0), lambda number, position: 0.95, 300)
    assert sum(gamma > 4 for gamma in chosen) <= 6
    assert chosen[-100:] == [4] * 100


def test_same_numbers_same_choices() -> None:
    times = flat(2.0, 6.0)
    assert simulate(times, lambda n, p: 0.8, 100) == simulate(times, lambda n, p: 0.8, 100)


def test_without_times_the_first_gamma_stays() -> None:
    chooser = Gamma()
    for _ in range(20):
        assert chooser.next() == 4
        chooser.record(4, [4], [0], None, None)
    assert Gamma(range(6, 9)).next() == 6


def test_only_drafts_that_could_be_accepted_count() -> None:
    """A row at its limit and a row that has ended say nothing about further positions."""
    chooser = Gamma()
    for _ in range(50):
        chooser.record(4, [2, 0], [2, 0], 1.0, 1.0)
    assert chooser.acceptance(0) > 0.95
    assert chooser.acceptance(3) == pytest.approx(chooser.acceptance(7))
    assert chooser.tokens(2) == pytest.approx(1 + chooser.acceptance(0) * (1 + chooser.acceptance(1)))


@pytest.mark.parametrize("choices", [(), (0, 1), (-2,)])
def test_choices_are_checked(choices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="choices"):
        Gamma(choices)


def test_acceptance_is_counted_by_position_and_pulled_towards_that_of_all() -> None:
    """Ten assumed drafts of 0.8 for all positions; the acceptance of all weighs as much as eight drafts in each."""
    chooser = Gamma(range(1, 5))
    assert [chooser.acceptance(position) for position in range(4)] == pytest.approx([0.8] * 4)
    chooser.record(3, [3, 0], [1, 0], None, None)  # the first draft is accepted, the second refused, the third unknown
    shared = (1 + 8) / (2 + 10)
    assert chooser.acceptance(0) == pytest.approx((1 + 8 * shared) / 9)
    assert chooser.acceptance(1) == pytest.approx(8 * shared / 9)
    assert chooser.acceptance(2) == pytest.approx(shared)
    chooser.record(2, [2, 1], [2, 1], None, None)  # what came before fades to 98 %
    accepted, tried = [0.98 + 2, 1.0], [0.98 + 2, 0.98 + 1]
    shared = (sum(accepted) + 8) / (sum(tried) + 10)
    for position in range(2):
        wanted = (accepted[position] + 8 * shared) / (tried[position] + 8)
        assert chooser.acceptance(position) == pytest.approx(wanted)
    first, second = chooser.acceptance(0), chooser.acceptance(1)
    assert chooser.tokens(0) == 1.0 and chooser.tokens(1) == pytest.approx(1 + first)
    assert chooser.tokens(2) == pytest.approx(1 + first + first * second)


def test_times_are_medians_and_verifications_between_timed_ones_are_interpolated() -> None:
    chooser = Gamma(range(1, 9))
    for draft, verify in ((0.2, 1.0), (20.0, 100.0), (0.2, 1.0)):  # one round was interrupted
        chooser.record(2, [2], [2], draft, verify)
    chooser.record(6, [6], [6], 0.6, 3.0)
    verifications = {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 5: 2.5, 6: 3.0, 8: 3.0}
    for gamma, seconds in verifications.items():
        assert chooser.rate(gamma) == pytest.approx(chooser.tokens(gamma) / (0.1 * gamma + seconds))
    for _ in range(9):  # nine newer times decide
        chooser.record(2, [2], [2], 0.4, 2.0)
    assert chooser.rate(2) == pytest.approx(chooser.tokens(2) / (0.2 * 2 + 2.0))


@pytest.mark.parametrize(
    ("factor", "timed", "moves"), [(1.005, True, False), (1.02, True, True), (1.02, False, False), (1.04, False, True)]
)
def test_gamma_moves_for_one_percent_or_for_three_if_untimed(factor, timed, moves, monkeypatch) -> None:
    chooser = Gamma((4, 6))
    assert chooser.next() == 4
    chooser.record(4, [4], [4], 0.4, 1.0)
    if timed:
        chooser.record(6, [6], [6], 0.6, 1.0)
    monkeypatch.setattr(chooser, "rate", {4: 1.0, 6: factor}.__getitem__)
    assert chooser.next() == (6 if moves else 4)


@pytest.mark.parametrize(("choices", "first"), [((1, 2), 2), ((2, 8), 2), ((3, 5), 3), ((9, 7), 7), ((4,), 4)])
def test_the_first_gamma_is_the_choice_closest_to_four(choices, first) -> None:
    assert Gamma(choices).next() == first
