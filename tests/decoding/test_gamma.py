"""The choice of gamma, by simulation against the best gamma that never changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from kvbench.decoding.gamma import Gamma

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
